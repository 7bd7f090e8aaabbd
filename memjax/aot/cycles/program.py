"""Operations of a compiled program and their number of runs, from its HLO text.

The text has a block for each computation, a line for each operation. The body of a
`while` runs as often as that loop, and one branch of a `conditional`. A loop that ends
by a flag is a conditional: it runs once or not at all. A fusion is one operation.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_BLOCK = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_LINE = re.compile(r"\s*(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<rest>.*)")
_OPCODE = re.compile(r"(?:^| )(?P<opcode>[a-z][\w\-]*)\(")
#: Attributes that name the computations of an operation.
_CALLS = "calls|branch_computations|true_computation|false_computation|to_apply"
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
        bytes: traffic by a kernel's cost estimate; 0 without one.
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
        unknown: loops of unknown length, counted once.
    """

    operations: tuple[Operation, ...]
    conditionals: tuple[Branches, ...]
    unknown: int


def read_program(text: str) -> Program:
    """Reads a compiled program's text.

    Raises:
        ValueError: it has no entry computation.
    """
    blocks, entry = _blocks(text)
    if entry is None:
        raise ValueError(
            f"text must have an ENTRY computation, got {len(text)} letters"
        )
    return _walk(blocks, entry, 1)


def every_line(text: str) -> Iterator[tuple[str, str, int]]:
    """Opcode, text and runs of every operation, also inside fusions and branches."""
    blocks, entry = _blocks(text)
    return _every_line(blocks, entry or "", 1)


def _every_line(
    blocks: Mapping[str, list[str]], block: str, times: int
) -> Iterator[tuple[str, str, int]]:
    for _, opcode, line in _lines(blocks, block):
        yield opcode, line, times
        if opcode == "while":
            trips = _trips(blocks, line) or 1
            yield from _every_line(blocks, _called(line, "body")[0], times * trips)
            continue
        for called in _called(line, _CALLS):
            yield from _every_line(blocks, called, times)


def free(operation: Operation) -> bool:
    """Whether an operation without an estimate has no noticeable cycles."""
    return operation.opcode in _FREE and not operation.kernel


def _blocks(text: str) -> tuple[dict[str, list[str]], str | None]:
    """The lines of each computation, and the name of the entry."""
    blocks: dict[str, list[str]] = {}
    entry = name = None
    for line in text.splitlines():
        head = _BLOCK.match(line)
        if head:
            name = head["name"]
            blocks[name] = []
            entry = name if head["entry"] else entry
        elif line.rstrip() == "}":
            name = None
        elif name is not None and _LINE.match(line):
            blocks[name].append(line)
        elif name is not None and blocks[name]:
            blocks[name][-1] += line
    return blocks, entry


def _walk(blocks: Mapping[str, list[str]], block: str, times: int) -> Program:
    operations: list[Operation] = []
    conditionals: list[Branches] = []
    unknown = 0

    def add(found: Program) -> None:
        nonlocal unknown
        operations.extend(found.operations)
        conditionals.extend(found.conditionals)
        unknown += found.unknown

    for name, opcode, line in _lines(blocks, block):
        if opcode == "while" and _ends_by_flag(blocks, line):
            body = _walk(blocks, _called(line, "body")[0], times)
            conditionals.append(Branches((Program((), (), 0), body)))
        elif opcode == "while":
            trips = _trips(blocks, line)
            unknown += trips is None
            add(_walk(blocks, _called(line, "body")[0], times * (trips or 1)))
        elif opcode == "call":
            add(_walk(blocks, _called(line, "to_apply")[0], times))
        elif opcode == "conditional":
            names = _called(line, "branch_computations")
            names = names or _called(line, "true_computation|false_computation")
            walked = tuple(_walk(blocks, branch, times) for branch in names)
            conditionals.append(Branches(walked))
        else:
            operations.append(_operation(blocks, name, opcode, line, times))
    return Program(tuple(operations), tuple(conditionals), unknown)


def _lines(
    blocks: Mapping[str, list[str]], block: str
) -> Iterator[tuple[str, str, str]]:
    """Name, opcode and text of every operation of a computation."""
    for line in blocks.get(block, ()):
        head = _LINE.match(line)
        # The type comes first, and has letters before brackets, not before "(".
        opcode = head and _OPCODE.search(head["rest"])
        if head and opcode:
            yield head["name"], opcode["opcode"], line


def _called(line: str, attribute: str) -> list[str]:
    """The computations of an attribute."""
    names = []
    for found in re.findall(rf"(?:{attribute})=(\{{[^}}]*\}}|%?[\w.\-]+)", line):
        names += re.findall(r"%?([\w.\-]+)", found)
    return names


def _ends_by_flag(blocks: Mapping[str, list[str]], line: str) -> bool:
    """Whether the condition of a loop is a flag in its state."""
    inside = {opcode for _, opcode, _ in _lines(blocks, _called(line, "condition")[0])}
    return inside <= {"parameter", "get-tuple-element", "bitcast", "copy"}


def _trips(blocks: Mapping[str, list[str]], line: str) -> int | None:
    """Number of runs of a loop: as annotated, or the bound of its condition."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
    if known:
        return int(known[1])
    condition = "\n".join(blocks.get(_called(line, "condition")[0], ()))
    bounds = [int(n) for n in re.findall(r"s32\[\]\S* constant\((\d+)\)", condition)]
    return bounds[0] if len(bounds) == 1 else None


def _operation(
    blocks: Mapping[str, list[str]], name: str, opcode: str, line: str, times: int
) -> Operation:
    estimate = re.search(r'"estimated_cycles":"(\d+)"', line)
    cycles = float(estimate[1]) if estimate else math.inf
    moved = re.search(r'"bytes_accessed":"(\d+)"', line)
    grid = re.search(r'"iteration_bounds":\[([^\]]*)\]', line)
    steps = 1
    for bound in re.findall(r"\d+", grid[1] if grid else ""):
        steps *= int(bound)
    source = re.search(r'op_name="([^"]*)"', line)
    moves = opcode in _MOVES
    if opcode == "fusion":
        inside = {found for _, found, _ in _inside(blocks, line)}
        moves = bool(inside & _MOVES) and inside <= _MOVES | _STILL
    return Operation(
        name=name,
        opcode=opcode,
        kernel=_KERNEL in line,
        moves=moves,
        estimate=cycles if cycles < MAX_CYCLES else None,
        bytes=int(moved[1]) if moved else 0,
        steps=steps if grid else None,
        times=times,
        source=_source(source[1]) if source else "",
        alike=_alike(line),
    )


def _inside(
    blocks: Mapping[str, list[str]], line: str
) -> Iterator[tuple[str, str, str]]:
    """The operations of a fusion, and of fusions in it."""
    for called in _called(line, "calls"):
        for found in _lines(blocks, called):
            yield found
            yield from _inside(blocks, found[2])


def _source(name: str) -> str:
    """The last parts of a path such as jit(f)/while/body/closed_call/dot_general."""
    parts = [part for part in name.split("/") if part not in ("body", "closed_call")]
    return "/".join(parts[1:][-3:])


def _alike(line: str) -> str:
    """A line without names, which identical operations share."""
    line = re.sub(r"metadata=\{[^}]*\},? ?", "", line)
    return re.sub(r"%[\w.\-]+|ROOT |\"aliasing_operands\".*", "", line)
