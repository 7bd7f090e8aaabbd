"""VLIW bundles of an operation and their utilization, from the files of libtpu.

The core issues one bundle per cycle. A line of `*-final_bundles.txt` begins with the
bundle's address and a `>` for every loop around it:

    0x44 LB: >>> { %s220 = sadd.s32 1, %s1491 ;; ... } /* Start region 87 */
    0x47   : >>> { %p5 = scmp.ge.s32.totalorder %s220, 5 /* loop exit test */ }
    0x5b   : >>> { %219 = sbr.rel (!%p5) target = $region87 }

A branch back to an earlier region is a loop; the test of the branch gives its length. A
branch ahead skips the bundles before its target: the regions of `pl.when`. Their tests
distinguish the first and last step of an axis, `pl.when(index == n)`, from others. A
few bundles after a branch are always issued.

The grid of a kernel is one loop in which loads, computation and stores of different
grid steps overlap. It runs two more times than there are steps: at its ends it only
loads or stores.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_ROW = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*: ?(>*|(?:> )*)")
_BRANCH = re.compile(r"sbr\.rel \((?P<test>!?%\w+)\) target = \$region(?P<region>\d+)")
_TEST = re.compile(r"(?P<test>%p\w+) = (?P<rest>[^;}]*)")
_START = re.compile(r"Start(?:/End empty)? region (\d+)")
#: Bundles after a branch that are always issued.
DELAY = 4
#: Runs of a grid's loop that only load or store.
PIPELINE = 2


class Row(NamedTuple):
    """One bundle: the number of loops around it, and its text."""

    depth: int
    text: str


class Loop(NamedTuple):
    """A loop of bundles.

    Attributes:
        first: index of its first bundle.
        last: index of its last bundle.
        steps: number of runs, or of steps of a grid; None if dynamic.
        grid: whether it is a grid.
    """

    first: int
    last: int
    steps: int | None
    grid: bool

    @property
    def bundles(self) -> int:
        """Number of bundles."""
        return self.last - self.first + 1


class Region(NamedTuple):
    """Bundles that a branch may skip.

    Attributes:
        first: index of the first.
        last: index of the last.
        end: whether they run where an index equals a constant: at the end of an axis.
    """

    first: int
    last: int
    end: bool

    @property
    def bundles(self) -> int:
        """Number of bundles."""
        return self.last - self.first + 1


class Shares(NamedTuple):
    """Shares of a kernel's steps in which its regions run; all in [0, 1].

    Attributes:
        ends: of regions for the first or the last step of an axis.
        longest: of the longest other region, which computes.
        bodies: of regions with the code of a kind of step, the longest of all, in the
            program's order.
    """

    ends: float = 1.0
    longest: float = 1.0
    bodies: Sequence[float] = ()


ALWAYS = Shares()


class Schedule(NamedTuple):
    """The bundles of one operation.

    Attributes:
        bundles: number of bundles.
        loops: in the order of their ends, so inner loops come first.
        regions: of branches, without the guards of pipelines.
        guards: regions with most of a grid, which count where a kernel has bodies.
    """

    bundles: int
    loops: tuple[Loop, ...]
    regions: tuple[Region, ...]
    guards: tuple[Region, ...] = ()

    @property
    def longest(self) -> Loop | None:
        """The loop with the most bundles: the grid of a Pallas kernel."""
        return max(self.loops, key=lambda x: x.bundles, default=None)

    def unknown(self, shares: Shares = ALWAYS) -> int:
        """Number of loops of dynamic length that run; they count as one run."""
        weights = self.weights(shares)
        return sum(x.steps is None and weights[x.first] > 0 for x in self.loops)

    def weights(self, shares: Shares = ALWAYS, steps: int | None = None) -> list[float]:
        """Number of times that each bundle is issued.

        Args:
            shares: of the steps in which regions run; other regions always run.
            steps: of the grid; None takes them from its test.
        """
        weights = [1.0] * self.bundles
        for loop in self.loops:
            known = steps if loop.grid and steps else loop.steps
            _multiply(weights, loop.first, loop.last, known or 1)
        bodies = self._bodies(len(shares.bodies))
        for region, share in zip(bodies, shares.bodies, strict=True):
            _multiply(weights, region.first, region.last, share)
        others = [region for region in self.regions if region not in bodies]
        inner = [region for region in others if not region.end]
        longest = max(inner, key=lambda x: x.bundles, default=None)
        for region in others:
            if region.end:
                _multiply(weights, region.first, region.last, shares.ends)
            elif region == longest:
                _multiply(weights, region.first, region.last, shares.longest)
        return weights

    def _bodies(self, count: int) -> list[Region]:
        """The longest regions, in the program's order."""
        by_length = sorted((*self.guards, *self.regions), key=lambda x: -x.bundles)
        return sorted(by_length[:count])


def read_schedule(text: str) -> Schedule:
    """Reads a file of final bundles."""
    rows = _rows(text)
    starts = _starts(rows)
    tests = {m["test"]: m["rest"] for row in rows for m in _TEST.finditer(row.text)}
    loops: list[Loop] = []
    regions: list[Region] = []
    for i, row in enumerate(rows):
        for branch in _BRANCH.finditer(row.text):
            start, test = starts.get(branch["region"]), branch["test"]
            if start is None:
                continue
            if start <= i:
                loops.append(_loop(rows, start, i, tests.get(test.lstrip("!"), "")))
            elif start > i + 1 + DELAY and not _guards(tests, test):
                end = _at_an_end(tests, test)
                regions.append(Region(i + 1 + DELAY, start - 1, end))
    grid = max((loop.bundles for loop in loops), default=0)
    # A region with most of a grid is a guard, though with a test of another form.
    guards = [x for x in regions if x.end and 2 * x.bundles > grid > 0]
    regions = [x for x in regions if x not in guards]
    return Schedule(len(rows), tuple(loops), tuple(regions), tuple(guards))


def _multiply(weights: list[float], first: int, last: int, factor: int | float) -> None:
    for i in range(first, last + 1):
        weights[i] *= factor


def _at_an_end(tests: Mapping[str, str], test: str) -> bool:
    """Whether a branch skips bundles unless an index equals a constant."""
    compared = "scmp.eq" if test.startswith("!") else "scmp.ne"
    asked = tests.get(test.lstrip("!"), "")
    return asked.startswith(compared) and re.search(r", -?\d+", asked) is not None


def _guards(tests: Mapping[str, str], test: str) -> bool:
    """Whether a branch skips the computation of a grid, at the ends of its pipeline."""
    asked = tests.get(test.lstrip("!"), "")
    operands = [tests.get(name, "") for name in re.findall(r"%\w+", asked)]
    bounds = ("scmp.ge.s32", "scmp.lt.s32")
    return asked.startswith("pnand") and all(
        any(operand.startswith(bound) for operand in operands) for bound in bounds
    )


def _rows(text: str) -> list[Row]:
    rows: list[Row] = []
    for line in text.splitlines():
        head = _ROW.match(line)
        if head:
            rows.append(Row(head[1].count(">"), line))
        elif rows:
            # A comment of a bundle may have several lines.
            rows[-1] = Row(rows[-1].depth, f"{rows[-1].text}\n{line}")
    return rows


def _starts(rows: Sequence[Row]) -> dict[str, int]:
    """The first bundle of each region."""
    found: dict[str, int] = {}
    for i, row in enumerate(rows):
        for region in _START.findall(row.text):
            found.setdefault(region, i)
    return found


def _loop(rows: Sequence[Row], first: int, branch: int, test: str) -> Loop:
    """The loop with the branch back in bundle `branch`."""
    depth = rows[first].depth
    last = branch
    while last + 1 < len(rows) and last < branch + DELAY:
        if rows[last + 1].depth < depth:
            break
        last += 1
    bound = re.search(r", (\d+) /\* loop exit test", test)
    runs = int(bound[1]) if bound else None
    grid = any(
        "iteration index, stage" in row.text
        for row in rows[first : last + 1]
        if row.depth == depth
    )
    if grid and runs is not None:
        runs = max(1, runs - PIPELINE)
    return Loop(first, last, runs, grid)


class Use(NamedTuple):
    """Utilization of the core by the bundles of an operation.

    Attributes:
        units: the used share of each unit's slots, by its name.
        spills: stores of spilled registers.
        fills: loads of spilled registers.
    """

    units: dict[str, float]
    spills: int
    fills: int


def read_use(text: str, weights: Sequence[int | float]) -> Use:
    """Reads a file of the utilization per bundle; `weights` as in `Schedule`."""
    head, _, table = text.partition("== UTILIZATION:")
    *_, names_line, capacity_line = head.strip().splitlines()
    names = [name.strip() for name in names_line.split(",")]
    capacity = [int(count) for count in capacity_line.split()]
    lines = [line.split() for line in table.split("==")[0].strip().splitlines()]
    rows = [[int(count) for count in line] for line in lines if len(line) == len(names)]
    if len(rows) != len(weights):
        raise ValueError(
            f"weights must be {len(rows)}, one a bundle, got {len(weights)}"
        )
    total = sum(weights)

    def used(i):
        return sum(w * row[i] for w, row in zip(weights, rows, strict=True))

    units: Mapping[str, float] = {
        name: round(used(i) / capacity[i] / total, 3)
        for i, name in enumerate(names)
        if ":" not in name
    }

    def count(name):
        return sum(row[names.index(name)] for row in rows)

    return Use(dict(units), count("VSTORE:SPILL"), count("VLOAD:FILL"))
