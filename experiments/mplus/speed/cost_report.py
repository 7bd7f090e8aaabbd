"""Tables and a plot of what `cost.py` measured."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.common import results

Row = dict[str, Any]


def show(
    rows: Mapping[str, Sequence[Row]], lengths: Sequence[int], path: Path, title: str
) -> None:
    """Prints a table a quantity, and draws a panel each.

    Args:
        rows: of every kind, one a length.
        lengths: tokens injected.
        path: the PNG to write.
        title: of the plot.
    """
    tables = {name: _table(rows, *value) for name, value in QUANTITIES.items()}
    for name, table in tables.items():
        results.show(name, [f"{length:,}" for length in lengths], table)
    _plot(tables, lengths, path, title)


def _get(*path: str) -> Callable[[Row], float]:
    """Follows a path in a row; NaN where it ends early."""

    def get(row):
        for name in path:
            row = row.get(name, {})
        return float("nan") if isinstance(row, dict) else row

    return get


# What is shown: its value in a row, and the unit.
QUANTITIES: dict[str, tuple[Callable[[Row], float], float]] = {
    "state (MiB)": (_get("state_bytes", "total"), 2**20),
    "of that on the device (MiB)": (_get("place_bytes", "device"), 2**20),
    "temporary, injecting (MiB)": (_get("temporary_bytes", "inject"), 2**20),
    "temporary, querying (MiB)": (_get("temporary_bytes", "query"), 2**20),
    "injecting (s)": (_get("seconds", "inject"), 1),
    "querying (s)": (_get("seconds", "query"), 1),
    "operations of injecting (10^9)": (_get("operations", "inject"), 1e9),
    "operations of querying (10^9)": (_get("operations", "query"), 1e9),
}


def _table(rows, get, unit):
    return {kind: [get(row) / unit for row in found] for kind, found in rows.items()}


def _plot(tables, lengths, path, title):
    """One panel a quantity, both axes logarithmic."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 11), layout="constrained")
    grid = figure.subplots(4, 2, sharex=True).flat
    for axes, (name, table) in zip(grid, tables.items(), strict=True):
        for kind, values in table.items():
            # Nothing, and what was not run, has no place on a logarithmic axis.
            shown = [value if value > 0 else float("nan") for value in values]
            axes.plot(lengths, shown, marker="o", markersize=3, label=kind)
        axes.set_title(name, fontsize="medium")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    figure.suptitle(title)
    FigureCanvasAgg(figure).print_png(path)
