"""Results over seeds: means and paired differences, printed, written and drawn."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from experiments.common.results import settings, write_report
from experiments.recurrent import comparison
from memjax.evaluation.statistics import interval, standard_error


def summarise(
    rows: Sequence[Mapping[str, Any]], metric: str, base: str, by: str | None = None
) -> list[dict]:
    """Mean and standard error over seeds, and the difference from a base by seeds.

    The difference is paired: model minus base with the same seed, and so the same
    batches. It is `clear` where zero lies outside its 95% interval (Student's t over
    three seeds or more, without correction for the number of rows).

    Args:
        rows: of `comparison.study`.
        metric: the number of a row that counts.
        base: name of the model that others are compared with.
        by: another field that distinguishes rows, such as the context length.
    """
    groups: dict[tuple, dict[int, float]] = {}
    for row in rows:
        key = (row["name"], row[by] if by else None)
        groups.setdefault(key, {})[row["seed"]] = row[metric]
    summary = []
    for (name, key), values in groups.items():
        against = groups.get((base, key), {})
        seeds = [seed for seed in values if seed in against]
        paired = [values[seed] - against[seed] for seed in seeds if name != base]
        mean, error = mean_and_error([*values.values()])
        difference, difference_error = mean_and_error(paired)
        summary.append(
            {"name": name}
            | ({by: key} if by else {})
            | {"mean": mean, "error": error, "seeds": len(values)}
            | {"difference": difference, "difference_error": difference_error}
            | {"clear": _clear(paired)}
        )
    return summary


def mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and standard error of it; None where there are too few values."""
    if not values:
        return None, None
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, None
    return mean, standard_error(values)


def write(
    config: comparison.Config,
    question: str,
    rows: Sequence[dict],
    **summaries: Any,
) -> None:
    """Writes `config.output`.json: where it comes from, summaries, and every run."""
    results = {"scale": config.scale._asdict()} | summaries | {"rows": list(rows)}
    write_report(config.output, question, settings(config), results)


def show(
    title: str,
    summary: Sequence[Mapping[str, Any]],
    base: str,
    *,
    columns: Sequence[str] = ("name",),
    paper: Mapping[str, float] | None = None,
    digits: int = 3,
) -> None:
    """Prints a summary; a star marks differences that are clear."""
    table = Table(title=title, caption="± standard error over seeds; * clear at 95%")
    for key in columns:
        table.add_column(key)
    for heading in (*(["paper"] if paper else []), "mean", f"against {base}"):
        table.add_column(heading, justify="right")
    for row in summary:
        cells = [str(row[key]) for key in columns]
        if paper:
            printed = paper.get(row["name"])
            cells.append("" if printed is None else f"{printed:.2f}")
        cells.append(_pair(row["mean"], row["error"], digits))
        star = "*" if row["clear"] else ""
        cells.append(_pair(row["difference"], row["difference_error"], digits) + star)
        table.add_row(*cells)
    Console().print(table)


def plot_bars(
    path: Path, summary: Sequence[Mapping[str, Any]], title: str, label: str
) -> None:
    """Draws one bar a row, from near the smallest value, with standard errors."""
    figure = Figure(figsize=(8, 0.6 + 0.35 * len(summary)), layout="constrained")
    axes = figure.subplots()
    means = np.array([row["mean"] for row in summary])
    errors = np.array([row["error"] or 0.0 for row in summary])
    low, high = (means - errors).min(), (means + errors).max()
    room = (high - low) or 1.0
    positions = np.arange(len(summary))
    axes.barh(positions, means, xerr=errors, capsize=2, color="C0", alpha=0.8)
    axes.set_yticks(positions, [row["name"] for row in summary])
    axes.set_xlim(low - 0.15 * room, high + 0.1 * room)
    axes.invert_yaxis()
    axes.set(title=title, xlabel=f"{label} (axis cut)")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=110)


def plot_lines(
    path: Path,
    panels: Mapping[str, Sequence[Mapping[str, Any]]],
    by: str,
    labels: tuple[str, str],
) -> None:
    """Draws each model's means against the field `by`, one panel a summary."""
    width = 2.5 + 4 * len(panels)
    figure = Figure(figsize=(width, 4.5), layout="constrained")
    styles = {}
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, summary) in zip(grid, panels.items(), strict=True):
        for row in summary:
            count = len(styles)
            style = dict(color=f"C{count % 10}", linestyle="-" if count < 10 else "--")
            styles.setdefault(row["name"], style)
        for name, style in styles.items():
            own = [row for row in summary if row["name"] == name]
            axes.errorbar(
                [row[by] for row in own],
                [row["mean"] for row in own],
                yerr=[row["error"] or 0.0 for row in own],
                marker="o",
                markersize=3,
                capsize=2,
                label=name,
                **style,
            )
        ticks = sorted({row[by] for row in summary})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set(title=title, xlabel=labels[0])
        axes.grid(alpha=0.3)
    grid[0].set_ylabel(labels[1])
    handles, names = grid[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=110)


def _clear(differences: Sequence[float]) -> bool:
    return len(differences) >= 3 and interval(differences).excludes_zero


def _pair(mean: float | None, error: float | None, digits: int) -> str:
    if mean is None:
        return ""
    if error is None:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {error:.{digits}f}"
