"""Results over seeds: means and paired differences, printed, written and drawn."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.lab.results import settings, write_report
from experiments.memories import small_models as comparison
from memjax.evaluation.drawing import COLOURS, drawing, log_ticks, source_of
from memjax.evaluation.statistics import interval, standard_error


def summarise(
    rows: Sequence[Mapping[str, Any]], metric: str, base: str, by: str | None = None
) -> list[dict]:
    """Mean and standard error over seeds, and the difference from a base by seeds.

    The difference is paired: model minus base with the same seed, and so the same
    batches. It is `clear` where zero lies outside its 95% interval (Student's t over
    three seeds or more, without correction for the number of rows).

    Args:
        rows: of `study.study`.
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
) -> dict[str, Any]:
    """Writes `config.output`.json: where it comes from, summaries, and every run."""
    results = summaries | {"rows": list(rows)}
    return write_report(config.output, question, settings(config), results)


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


def plot_means(result: Mapping[str, Any], path: Path, title: str, label: str) -> None:
    """Draws the mean perplexity of each row with its standard error.

    Points, and not bars: the axis does not begin at 0.
    """
    summary = result["perplexity"]
    size = (8, 1.4 + 0.34 * len(summary))
    with drawing(path, size=size, title=title, source=source_of(result)) as drawn:
        axes = drawn.grid[0, 0]
        means = np.array([row["mean"] for row in summary])
        errors = np.array([row["error"] or 0.0 for row in summary])
        places = np.arange(len(summary))
        axes.errorbar(means, places, xerr=errors, fmt="o", color=COLOURS[0])
        beside = axes.get_yaxis_transform()
        for row, place in zip(summary, places, strict=True):
            text = _pair(row["mean"], row["error"], 2)
            axes.text(1.02, place, text, transform=beside, verticalalignment="center")
        axes.set_yticks(places, [row["name"] for row in summary])
        axes.invert_yaxis()
        axes.set(xlabel=f"{label}, mean ± standard error over seeds")


def plot_lines(
    result: Mapping[str, Any],
    path: Path,
    panels: Mapping[str, Sequence[Mapping[str, Any]]],
    by: str,
    labels: tuple[str, str],
) -> None:
    """Draws each model's means against the field `by`, one panel a summary."""
    names = list(dict.fromkeys(r["name"] for rows in panels.values() for r in rows))
    size = (2.5 + 5.5 * len(panels), 5.2)
    with drawing(
        path, columns=len(panels), size=size, source=source_of(result)
    ) as drawn:
        for axes, (title, summary) in zip(drawn.grid[0], panels.items(), strict=True):
            for i, name in enumerate(names):
                own = [row for row in summary if row["name"] == name]
                errors = [row["error"] or 0.0 for row in own]
                places, means = ([row[k] for row in own] for k in (by, "mean"))
                drawn.line(axes, places, means, name, i, errors=errors)
            log_ticks(axes, [row[by] for row in summary])
            axes.set(title=title, xlabel=labels[0])
        drawn.grid[0, 0].set_ylabel(labels[1])


def _clear(differences: Sequence[float]) -> bool:
    return len(differences) >= 3 and interval(differences).excludes_zero


def _pair(mean: float | None, error: float | None, digits: int) -> str:
    if mean is None:
        return ""
    if error is None:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {error:.{digits}f}"
