"""Operations of a compiled program and their number of runs, from its HLO text.

The text has a block for each computation, a line for each operation. The body of a
`while` runs as often as that loop, and one branch of a `conditional`. A loop that ends
by a flag is a conditional: it runs once or not at all. A fusion is one operation.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from memjax.aot.cycles.text import CALLS, Blocks, Line, read_blocks
from memjax.aot.cycles.traffic import traffic

_KERNEL = 'custom_call_target="tpu_custom_call"'
#: Operations that only move data.
_MOVES = {"copy", "transpose", "reshape", "broadcast", "slice", "concatenate", "pad"}
_MOVES |= {"dynamic-slice", "dynamic-update-slice", "reverse", "copy-start"}
#: Other operations in a fusion that only moves data.
_STILL = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "fusion"}
#: Operations without noticeable cycles of the core.
_FREE = _STILL | {"copy-start", "copy-done", "slice-start", "slice-done", "after-all"}
_FREE |= {"async-start", "async-done", "async-update", "opt-barrier", "partition-id"}
_FREE |= {"custom-call"}
#: Cycles of a day; the compiler estimates more for an unknown duration.
MAX_CYCLES = 1e14


class Operation(NamedTuple):
    """An operation of the program.

    Attributes:
        name: with its number, as in the names of its files.
        opcode: of HLO.
        kernel: whether it is a Pallas kernel.
        moves: whether it only copies: into another layout, out of or into an array.
        estimate: of the compiler, in cycles with memory traffic; None without one.
        bytes: moved at least: by a kernel's cost estimate, 0 without one, and by the
            types of XLA's operations.
        steps: of the operation's grid; None if unknown.
        times: number of runs.
        source: the function of jax that it comes from, with its callers.
        alike: equal for identical operations, of which the compiler schedules one.
    """

    name: str
    opcode: str
    kernel: bool
    moves: bool
    estimate: float | None
    bytes: int
    steps: int | None
    times: int
    source: str
    alike: str


class Branches(NamedTuple):
    """A conditional: the operations of each branch."""

    branches: tuple["Program", ...]


class Program(NamedTuple):
    """Operations and conditionals, in the order of the text.

    Attributes:
        operations: of every computation that runs.
        conditionals: their branches are not in `operations`.
        loops: names of those whose length a run finds; counted once.
    """

    operations: tuple[Operation, ...]
    conditionals: tuple[Branches, ...]
    loops: tuple[str, ...]


def read_program(text: str) -> Program:
    """Reads a compiled program's text.

    Raises:
        ValueError: it has no entry computation.
    """
    blocks, entry = read_blocks(text)
    if entry is None:
        raise ValueError(
            f"text must have an ENTRY computation, got {len(text)} letters"
        )
    return _walk(blocks, entry, 1)


def every_line(text: str) -> Iterator[tuple[str, str, int]]:
    """Opcode, text and runs of every operation, also inside fusions and branches."""
    blocks, entry = read_blocks(text)
    return _every_line(blocks, entry or "", 1)


def _every_line(
    blocks: Blocks, block: str, times: int
) -> Iterator[tuple[str, str, int]]:
    for line in blocks.get(block, {}).values():
        yield line.opcode, line.text, times
        if line.opcode == "while":
            trips = _trips(blocks, line) or 1
            yield from _every_line(blocks, line.called("body")[0], times * trips)
            continue
        for called in line.called(CALLS):
            yield from _every_line(blocks, called, times)


def free(operation: Operation) -> bool:
    """Whether an operation without an estimate has no noticeable cycles."""
    return operation.opcode in _FREE and not operation.kernel


def _walk(blocks: Blocks, block: str, times: int) -> Program:
    operations: list[Operation] = []
    conditionals: list[Branches] = []
    unknown: list[str] = []

    def add(found: Program) -> None:
        operations.extend(found.operations)
        conditionals.extend(found.conditionals)
        unknown.extend(found.loops)

    for line in blocks.get(block, {}).values():
        opcode = line.opcode
        if opcode == "while" and _ends_by_flag(blocks, line):
            body = _walk(blocks, line.called("body")[0], times)
            conditionals.append(Branches((Program((), (), ()), body)))
        elif opcode == "while":
            trips = _trips(blocks, line)
            unknown.extend([line.name] if trips is None else [])
            add(_walk(blocks, line.called("body")[0], times * (trips or 1)))
        elif opcode == "call":
            add(_walk(blocks, line.called("to_apply")[0], times))
        elif opcode == "conditional":
            names = line.called("branch_computations")
            names = names or line.called("true_computation|false_computation")
            walked = tuple(_walk(blocks, branch, times) for branch in names)
            conditionals.append(Branches(walked))
        else:
            operations.append(_operation(blocks, block, line, times))
    return Program(tuple(operations), tuple(conditionals), tuple(unknown))


def _ends_by_flag(blocks: Blocks, line: Line) -> bool:
    """Whether the condition of a loop is a flag in its state."""
    inside = blocks.get(line.called("condition")[0], {}).values()
    flags = {"parameter", "get-tuple-element", "bitcast", "copy"}
    return {x.opcode for x in inside} <= flags


def _trips(blocks: Blocks, line: Line) -> int | None:
    """Number of runs of a loop: as annotated, or the bound of its condition."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line.text)
    if known:
        return int(known[1])
    inside = blocks.get(line.called("condition")[0], {}).values()
    condition = "\n".join(x.text for x in inside)
    bounds = [int(n) for n in re.findall(r"s32\[\]\S* constant\((\d+)\)", condition)]
    return bounds[0] if len(bounds) == 1 else None


def _operation(blocks: Blocks, block: str, line: Line, times: int) -> Operation:
    text, opcode = line.text, line.opcode
    estimate = re.search(r'"estimated_cycles":"(\d+)"', text)
    cycles = float(estimate[1]) if estimate else math.inf
    kernel = _KERNEL in text
    said = re.search(r'"bytes_accessed":"(\d+)"', text)
    moved = int(said[1]) if said else 0
    grid = re.search(r'"iteration_bounds":\[([^\]]*)\]', text)
    steps = 1
    for bound in re.findall(r"\d+", grid[1] if grid else ""):
        steps *= int(bound)
    source = re.search(r'op_name="([^"]*)"', text)
    moves = opcode in _MOVES
    if opcode == "fusion":
        inside = {found.opcode for found in _inside(blocks, line)}
        moves = bool(inside & _MOVES) and inside <= _MOVES | _STILL
    return Operation(
        name=line.name,
        opcode=opcode,
        kernel=kernel,
        moves=moves,
        estimate=cycles if cycles < MAX_CYCLES else None,
        bytes=moved if kernel else traffic(blocks, block, line),
        steps=steps if grid else None,
        times=times,
        source=_source(source[1]) if source else "",
        alike=_alike(text),
    )


def _inside(blocks: Blocks, line: Line) -> Iterator[Line]:
    """The operations of a fusion, and of fusions in it."""
    for called in line.called("calls"):
        for found in blocks.get(called, {}).values():
            yield found
            yield from _inside(blocks, found)


def _source(name: str) -> str:
    """The last parts of a path such as jit(f)/while/body/closed_call/dot_general."""
    parts = [part for part in name.split("/") if part not in ("body", "closed_call")]
    return "/".join(parts[1:][-3:])


def _alike(line: str) -> str:
    """A line without names, which identical operations share."""
    line = re.sub(r"metadata=\{[^}]*\},? ?", "", line)
    return re.sub(r"%[\w.\-]+|ROOT |\"aliasing_operands\".*", "", line)
