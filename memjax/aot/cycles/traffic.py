"""Least memory traffic of XLA's operations, from the types in a program's text.

An operation reads its operands and writes its results once. Of an array that only
slices read, the slices count, and of one that is updated in place its update. Arrays in
the core's own memory, `S(1)` in their layout, are no traffic, nor is a tile's padding.
"""

import math
import re
from collections.abc import Iterator, Mapping

from memjax.aot.cycles.text import Blocks, Line

_ARRAY = re.compile(
    r"(?P<dtype>[a-z]+(?P<bits>\d*)\w*)\[(?P<sizes>[\d,]*)\](?:\{(?P<layout>[^}]*)\})?"
)
_SLICES = {"dynamic-slice", "slice", "gather"}
_UPDATE = "dynamic-update-slice"
#: Operations that give their operand another shape or name.
_NAMES = {"bitcast", "reshape"}


def traffic(blocks: Blocks, block: str, line: Line) -> int:
    """Bytes that an operation of a computation moves at least."""
    around, fused = blocks[block], line.opcode == "fusion"
    inside = blocks[line.called("calls")[0]] if fused else {line.name: line}
    total = 0.0
    for i, operand in enumerate(line.operands):
        name = _parameter(inside, i) if fused else operand
        if operand in around and (whole := _bytes(around[operand].type)):
            total += min(whole, _read(inside, name, whole))
    results = _results(inside, line)
    for given, result in zip(_ARRAY.finditer(line.type), results, strict=False):
        written = _bytes(given[0])
        if result and result.opcode == _UPDATE:
            # Of an array that stays where it is.
            update = result.operands[1]
            kind = (inside if fused else around)[update].type
            written = min(written, _bytes(kind, anywhere=True))
        total += written
    return int(total)


def _parameter(inside: Mapping[str, Line], index: int) -> str:
    """The name of a computation's parameter."""
    said = f" parameter({index})"
    return next((x.name for x in inside.values() if said in x.text), "")


def _read(inside: Mapping[str, Line], name: str, whole: float) -> float:
    """Bytes of an array that the operations of a computation read."""
    total = 0.0
    for use in inside.values():
        if name not in use.operands:
            continue
        first = use.operands[0] == name
        if first and use.opcode in _SLICES:
            total += _bytes(use.type, anywhere=True)
        elif first and use.opcode in _NAMES and not use.root:
            total += _read(inside, use.name, whole)
        elif not (first and use.opcode == _UPDATE):
            return whole
    return total


def _results(inside: Mapping[str, Line], line: Line) -> Iterator[Line | None]:
    """The operations that make the results, in order."""
    if line.opcode != "fusion":
        yield line
        return
    root = next(x for x in inside.values() if x.root)
    made = [inside.get(x) for x in root.operands] if root.opcode == "tuple" else [root]
    for found in made:
        while found and found.opcode in _NAMES:
            found = inside.get(found.operands[0])
        yield found


def _bytes(kind: str, anywhere: bool = False) -> float:
    """Bytes of a type's arrays, without those in the core's own memory."""
    total = 0.0
    for array in _ARRAY.finditer(kind):
        if "S(" in (array["layout"] or "") and not anywhere:
            continue
        sizes = [int(size) for size in array["sizes"].split(",") if size]
        bits = 8 if array["dtype"] == "pred" else int(array["bits"] or 0)
        total += math.prod(sizes) * bits / 8
    return total
