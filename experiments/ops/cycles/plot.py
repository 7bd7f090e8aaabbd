"""The plot of counted cycles: memories and attention against the length."""

import pathlib
import re
from typing import Any, NamedTuple

from experiments.lab.results import figure
from experiments.ops.cycles.cases_ops import SHAPE
from memjax.evaluation.drawing import drawing, log_ticks, log_values, source_of

#: What is drawn, by the beginning of its cases' names.
LINES = {
    "trellis/c64": "Trellis",
    "lattice-dec/c64": "Lattice",
    "attention/d64": "causal attention, heads of 64",
    "splash/d64": "splash attention, heads of 64",
    "splash/d128": "splash attention, heads of 128",
}


class Point(NamedTuple):
    """Cycles of a token and head at a length, and the least by memory."""

    time: int
    cycles: float
    least: float


def points(cases: dict[str, dict[str, Any]], beginning: str) -> list[Point]:
    """The points of a line, forward with backward, by length."""
    found = []
    for name, case in cases.items():
        match = re.fullmatch(rf"{beginning}(?:/t(\d+))?/both", name)
        if match:
            time = int(match[1] or SHAPE.time)
            found.append(Point(time, case["cycles"], case["memory_cycles"]))
    return sorted(found)


@figure("ops/tpu_cycles")
def plot(result: dict[str, Any], path: pathlib.Path) -> None:
    """Cycles per token and head against T, forward with backward, on a v5e."""
    lines = {name: points(result["cases"], part) for part, name in LINES.items()}
    lines = {name: found for name, found in lines.items() if found}
    if not lines:
        return
    title = "Cycles per token and head, forward and backward, v5e"
    with drawing(path, title=title, source=source_of(result)) as drawn:
        axes = drawn.grid[0, 0]
        for i, (name, found) in enumerate(lines.items()):
            lengths = [point.time for point in found]
            drawn.line(axes, lengths, [point.cycles for point in found], name, i)
            least = [point.least for point in found]
            name = f"least by memory: {name}"
            drawn.line(axes, lengths, least, name, i, linestyle=":", marker="")
        log_values(axes)
        axes.set(xlabel="tokens T", ylabel="cycles")
        log_ticks(axes, [point.time for found in lines.values() for point in found])
