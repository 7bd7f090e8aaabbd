"""What the alignment of each memory has come to: its table's numbers and its plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.compare.documents import KINDS
from memjax.evaluation.drawing import COLOURS, drawing, source_of
from memjax.evaluation.statistics import paired

WINDOW, WIDE = "window", "wide window"


def summary(
    rows: Sequence[dict[str, Any]], kinds: Sequence[str]
) -> list[dict[str, Any]]:
    """Of each row by kind: the mean share, and what is won over the wide window."""
    by_name: dict[str, list] = {}
    for row in rows:
        by_name.setdefault(row["name"], []).append(row["missed"])
    means = {name: np.mean(found, axis=0) for name, found in by_name.items()}
    found = []
    for name, values in means.items():
        line: dict[str, Any] = {"name": name, "seeds": len(by_name[name])}
        for kind in KINDS:
            of_kind = np.asarray(kinds) == kind
            won = paired(means[WIDE][of_kind], values[of_kind])
            line[kind] = {"missed": float(values[of_kind].mean()), **won._asdict()}
        found.append(line)
    return found


def plot(result: dict[str, Any], path: Path) -> None:
    """What each row misses of each kind, with the wide window as a line."""
    rows = result["summary"]
    with drawing(
        path,
        columns=len(KINDS),
        size=(10, 1.5 + 0.3 * len(rows)),
        title=f"Share of full attention's output that is missed in layer "
        f"{result['config']['layer']}",
        source=source_of(result),
        sharey=True,
    ) as drawn:
        for number, kind in enumerate(KINDS):
            axes = drawn.grid[0, number]
            values = [row[kind]["missed"] for row in rows]
            axes.barh([row["name"] for row in rows], values, color=COLOURS[number])
            wide = next(row for row in rows if row["name"] == WIDE)
            axes.axvline(wide[kind]["missed"], color="0.3", linestyle="--")
            axes.set(title=kind, xlabel="share missed")
        drawn.grid[0, 0].invert_yaxis()
