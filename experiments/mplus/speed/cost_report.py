"""Tables and a plot of what `cost.py` measured."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.lab import results
from experiments.lab.results import figure
from memjax.evaluation.drawing import drawing, log_ticks, log_values, source_of

Row = dict[str, Any]


def show(rows: Mapping[str, Sequence[Row]], lengths: Sequence[int]) -> None:
    """Prints a table a quantity.

    Args:
        rows: of every kind, one a length.
        lengths: tokens injected.
    """
    for name, table in _tables(rows).items():
        results.show(name, [f"{length:,}" for length in lengths], table)


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


def _tables(rows: Mapping[str, Sequence[Row]]) -> dict[str, dict[str, list[float]]]:
    """Every quantity of every kind, by length."""
    return {
        name: {kind: [get(row) / unit for row in found] for kind, found in rows.items()}
        for name, (get, unit) in QUANTITIES.items()
    }


@figure("mplus/cost")
def plot(result: Mapping[str, Any], path: Path) -> None:
    """One panel a quantity, both axes logarithmic."""
    rows = result["models"]
    lengths = sorted({row["length"] for found in rows.values() for row in found})
    with drawing(
        path,
        rows=4,
        columns=2,
        size=(11, 13),
        title=f"M+ and its backbone ({result['config']['size']}) against tokens "
        "injected",
        source=source_of(result),
        sharex=True,
    ) as drawn:
        for axes, (name, table) in zip(
            drawn.grid.flat, _tables(rows).items(), strict=True
        ):
            for i, (kind, values) in enumerate(table.items()):
                # Nothing has no place on a logarithmic axis.
                shown = [value if value > 0 else float("nan") for value in values]
                drawn.line(axes, lengths[: len(shown)], shown, kind, i)
            axes.set_title(name)
            log_values(axes)
            log_ticks(axes, lengths, 5)
        for axes in drawn.grid[-1]:
            axes.set_xlabel("tokens injected")
