"""Collectives of a compiled program, with their bytes."""

import re
from typing import NamedTuple

from memjax.aot.cycles.program import every_line

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "between slices",
)
#: Marks traffic between slices, over the data-center network.
_NETWORK = "xla_megascale_runtime"
_BITS = {"pred": 8, "s4": 4, "u4": 4}
_ARRAY = re.compile(r"\b(pred|bf16|[suf]\d+)(?:e\w+)?\[([\d,]*)\]")


class Collective(NamedTuple):
    """All collectives of one kind.

    Attributes:
        kind: of HLO, such as "all-gather"; or "between slices".
        runs: number of executions in a call of the program, loops included.
        bytes: of their results on one device, in all runs.
        largest: bytes of the largest result.
    """

    kind: str
    runs: int
    bytes: int
    largest: int


def collectives(text: str) -> list[Collective]:
    """The collectives of a program's text by kind, the most bytes first.

    A collective that overlaps with computation is split into fusions with the same
    channel, and counts once.
    """
    found: dict[str, tuple[str, int, int]] = {}
    for i, (opcode, line, runs) in enumerate(every_line(text)):
        network = opcode == "send" and _NETWORK in line
        kind = KINDS[-1] if network else opcode.removesuffix("-start")
        if kind in KINDS:
            channel = re.search(r"channel_id=(\d+)", line)
            name = channel[1] if channel else f"line {i}"
            found[name] = (kind, runs, result_bytes(opcode, line))
    rows = [
        Collective(
            kind,
            sum(runs for _, runs, _ in same),
            sum(runs * size for _, runs, size in same),
            max(size for _, _, size in same),
        )
        for kind in KINDS
        if (same := [one for one in found.values() if one[0] == kind])
    ]
    return sorted(rows, key=lambda row: -row.bytes)


def result_bytes(opcode: str, line: str) -> int:
    """Bytes of the result of a collective on one device."""
    result = line.split(" = ", 1)[1].split(f" {opcode}(")[0]
    # The context of an asynchronous one has no size in brackets.
    sizes = [_bytes(*array) for array in _ARRAY.findall(result) if array != ("u32", "")]
    if opcode.endswith("-start") and opcode != "all-reduce-start":
        # The operands come first, then the results.
        sizes = sizes[len(sizes) // 2 :]
    return sum(sizes)


def _bytes(dtype: str, shape: str) -> int:
    bits = _BITS.get(dtype) or int(re.findall(r"\d+", dtype)[0])
    elements = 1
    for size in filter(None, shape.split(",")):
        elements *= int(size)
    return elements * bits // 8
