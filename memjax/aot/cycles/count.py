"""Cycles of a compiled program, counted from the files of its compilation.

A kernel takes the bundles that its schedule issues, and at least the time of the bytes
of its cost estimate. An operation of XLA is a range. Its upper end is the compiler's
estimate, or the bundles if they are more; the estimate includes memory traffic, and for
copies into other tiles it can be ten times the time. The lower end is the bundles, or
the time of its bytes if that is more.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from memjax.aot.cycles.bundles import (
    ALWAYS,
    Schedule,
    Shares,
    Use,
    read_schedule,
    read_use,
)
from memjax.aot.cycles.program import Operation, Program, free, read_program

#: Files of a folder: a program, and for each operation its bundles and utilization.
PROGRAM = "program.hlo"
_BUNDLES = re.compile(r"(?P<key>\d+-(?P<name>.+))-\d+-final_bundles\.txt$")
#: How opcodes begin that exchange between devices.
_WAITS = ("all-", "reduce-scatter", "collective-")
_USE = "final_hlo-static-per-bundle-utilization"


class Part(NamedTuple):
    """The cycles of one operation in all its runs.

    Attributes:
        operation: the operation.
        least: cycles of all runs by bundles or bytes.
        cycles: of all runs by bundles or the compiler's estimate.
        scheduled: whether the cycles are issued bundles; False: an estimate.
    """

    operation: Operation
    least: float
    cycles: float
    scheduled: bool


class Kernel(NamedTuple):
    """The schedule of a Pallas kernel.

    Attributes:
        name: with its number.
        cycles: of one run.
        bundles: of the longest loop, the grid.
        steps: of that loop.
        use: of the units, spills and fills.
        regions: bundles that branches may skip.
        unknown: loops whose length a run finds; counted once.
    """

    name: str
    cycles: float
    bundles: int
    steps: int
    use: Use
    regions: int
    unknown: int


class Count(NamedTuple):
    """The cycles of one program.

    Attributes:
        parts: of every operation with cycles; of each conditional the branch with the
            fewest, which is the usual one.
        dearest: additional cycles of the branches with the most.
        kernels: every Pallas kernel.
        uncounted: names of operations without bundles and estimate.
        unknown: names of loops, kernels and other operations with loops whose length a
            run finds, each counted once.
    """

    parts: tuple[Part, ...]
    dearest: float
    kernels: tuple[Kernel, ...]
    uncounted: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def least(self) -> float:
        """Of the whole program, by bundles and bytes."""
        return sum((part.least for part in self.parts), 0.0)

    @property
    def cycles(self) -> float:
        """Of the whole program, by the compiler's estimates where they are more."""
        return sum((part.cycles for part in self.parts), 0.0)


def span(least: float, most: float, digits: int = 0) -> str:
    """A range as text: one number where both ends read the same."""
    ends = dict.fromkeys(f"{end:,.{digits}f}" for end in (least, most))
    return " to ".join(ends)


def count(
    folder: Path,
    shares: Mapping[str, Shares] | None = None,
    bytes_per_cycle: float = math.inf,
) -> Count:
    """Counts a program.

    Args:
        folder: with `PROGRAM` and the files of libtpu.
        shares: of the steps in which regions of a kernel run, by a part of the
            kernel's name; other kernels run in all steps.
        bytes_per_cycle: of the chip's memory, for kernels with a cost estimate.
    """
    program = read_program((folder / PROGRAM).read_text())
    files = _files(folder)
    counter = _Counter(files, shares or {}, _alike(program), bytes_per_cycle)
    parts, dearest, loops = _count(program, counter)
    names = {counter.written(p.operation) for p in parts if p.operation.kernel}
    kernels = tuple(counter.kernel(name) for name in sorted(filter(None, names)))
    lost = sorted(counter.uncounted)
    loops += [p.operation.name for p in parts if counter.unknown(p.operation)]
    return Count(tuple(parts), dearest, kernels, tuple(lost), tuple(loops))


#: Parts, additional cycles of dearest branches, and loops whose length a run finds.
_Counted = tuple[list[Part], float, list[str]]


def _count(program: Program, counter: "_Counter") -> _Counted:
    parts = [part for x in program.operations if (part := counter.part(x))]
    dearest, loops = 0.0, list(program.loops)
    for conditional in program.conditionals:
        counted = [_count(branch, counter) for branch in conditional.branches]

        counted.sort(key=_total)
        parts += counted[0][0]
        dearest += _total(counted[-1]) + counted[-1][1] - _total(counted[0])
        loops += counted[0][2]
    return parts, dearest, loops


def _total(counted: _Counted) -> float:
    return sum((part.cycles for part in counted[0]), 0.0)


class _Counter:
    """Counts operations by the schedules of a folder."""

    def __init__(
        self,
        files: Mapping[str, Path],
        shares: Mapping[str, Shares],
        alike: Mapping[str, list[str]],
        bytes_per_cycle: float,
    ):
        self.files, self.shares, self.alike = files, shares, alike
        self.bytes_per_cycle = bytes_per_cycle
        self.schedules: dict[str, Schedule] = {}
        self.uncounted: set[str] = set()

    def part(self, operation: Operation) -> Part | None:
        """The cycles of an operation; None without any."""
        issued = self.issued(operation)
        if issued is None and operation.estimate is None:
            if not free(operation) and not _scalar(operation):
                self.uncounted.add(operation.name)
            return None
        moved = operation.bytes / self.bytes_per_cycle
        estimate = moved if operation.kernel else operation.estimate or 0.0
        cycles = max(issued or 0.0, estimate)
        least = min(cycles, max(issued or 0.0, moved))
        scheduled = issued is not None and issued >= estimate
        times = operation.times
        return Part(operation, times * least, times * cycles, scheduled)

    def issued(self, operation: Operation) -> float | None:
        """Bundles that one run issues; None if unknown."""
        name = self.written(operation)
        if name is None:
            return None
        steps = None if operation.kernel else operation.steps
        return sum(self.schedule(name).weights(self.share(name), steps))

    def unknown(self, operation: Operation) -> bool:
        """Whether a run finds the length of a loop of its schedule.

        Not where the compiler estimates all of an operation of XLA, nor in waiting for
        other devices.
        """
        name = self.written(operation)
        waits = operation.opcode.startswith(_WAITS)
        if name is None or (operation.estimate is not None and not operation.kernel):
            return False
        return self.schedule(name).unknown(self.share(name)) > 0 and not waits

    def written(self, operation: Operation) -> str | None:
        """The name of the operation, or of an identical one, that has a file."""
        for name in (operation.name, *self.alike.get(operation.alike, ())):
            if name in self.files:
                return name
        return None

    def schedule(self, name: str) -> Schedule:
        if name not in self.schedules:
            self.schedules[name] = read_schedule(self.files[name].read_text())
        return self.schedules[name]

    def share(self, name: str) -> Shares:
        found = [part for part in self.shares if part in name]
        # The name of a kernel with a window begins as that of one without.
        return self.shares[max(found, key=len)] if found else ALWAYS

    def kernel(self, name: str) -> Kernel:
        file = self.files[name]
        schedule = self.schedule(name)
        weights = schedule.weights(self.share(name))
        match = _BUNDLES.match(file.name)
        assert match is not None, file
        (use,) = file.parent.glob(f"{match['key']}-[0-9][0-9]-{_USE}.txt")
        loop = schedule.longest
        return Kernel(
            name=name,
            cycles=sum(weights),
            bundles=loop.bundles if loop else schedule.bundles,
            steps=(loop and loop.steps) or 1,
            use=read_use(use.read_text(), weights),
            regions=sum(region.bundles for region in schedule.regions),
            unknown=schedule.unknown(self.share(name)),
        )


def _files(folder: Path) -> dict[str, Path]:
    """The files of bundles, by operation."""
    matches = ((_BUNDLES.match(file.name), file) for file in folder.iterdir())
    # Of two compilations of an operation the later one runs.
    found = sorted((m["key"], m["name"], file) for m, file in matches if m)
    return {name: file for _, name, file in found if "schedule-analysis" not in name}


def _alike(program: Program) -> dict[str, list[str]]:
    """Names of identical operations."""
    found: dict[str, list[str]] = {}
    for operation in program.operations:
        found.setdefault(operation.alike, []).append(operation.name)
    for conditional in program.conditionals:
        for branch in conditional.branches:
            for key, names in _alike(branch).items():
                found.setdefault(key, []).extend(names)
    return found


def _scalar(operation: Operation) -> bool:
    """Whether the result of an operation is a scalar."""
    return bool(re.match(r"\s* = \w+\[\]", operation.alike))
