"""What libtpu writes down of one operation: its VLIW bundles, and what they use.

A bundle is what the core issues in one cycle. A line of `*-final_bundles.txt` begins
with the bundle's address and a `>` for every loop that it stands in:

    0x44 LB: >>> { %s220 = sadd.s32 1, %s1491 ;; ... } /* Start region 87 */
    0x47   : >>> { %p5 = scmp.ge.s32.totalorder %s220, 5 /* loop exit test */ }
    0x5b   : >>> { %219 = sbr.rel (!%p5) target = $region87 }

A branch back to a region that began before is a loop, and the test that its branch
asks says how often it runs. A branch ahead leaves out what stands before its target:
such are the regions of `pl.when`. What their tests compare tells the first and last
step of an axis, `pl.when(index == n)`, from others. A few bundles after a branch are
issued in any case.

The grid of a kernel is one loop in which loading, computing and storing of different
grid steps overlap, so it runs twice more than there are steps: at its ends it only
loads or stores.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_ROW = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*: ?(>*|(?:> )*)")
_BRANCH = re.compile(r"sbr\.rel \((?P<test>!?%\w+)\) target = \$region(?P<region>\d+)")
_TEST = re.compile(r"(?P<test>%p\w+) = (?P<rest>[^;}]*)")
_START = re.compile(r"Start(?:/End empty)? region (\d+)")
#: Bundles after a branch that are issued whether it is taken or not.
DELAY = 4
#: Runs of a grid's loop that only load or store.
PIPELINE = 2


class Row(NamedTuple):
    """One bundle: the number of loops that it stands in, and its text."""

    depth: int
    text: str


class Loop(NamedTuple):
    """A loop: its first and last bundle, and how often it runs.

    Attributes:
        first: index of its first bundle.
        last: index of its last bundle.
        steps: how often it runs, or of a grid how many steps it has; None where the
            program decides that when it runs.
        grid: whether it is a grid.
    """

    first: int
    last: int
    steps: int | None
    grid: bool

    @property
    def bundles(self) -> int:
        """How many bundles it has."""
        return self.last - self.first + 1


class Region(NamedTuple):
    """Bundles that a branch may leave out.

    Attributes:
        first: index of the first.
        last: index of the last.
        end: whether they run where an index equals a constant: at an axis' end.
    """

    first: int
    last: int
    end: bool

    @property
    def bundles(self) -> int:
        """How many bundles it has."""
        return self.last - self.first + 1


class Shares(NamedTuple):
    """In which share of a kernel's steps its regions run; all in [0, 1].

    Attributes:
        ends: of regions for the first or the last step of an axis.
        longest: of the longest other region, which computes.
    """

    ends: float = 1.0
    longest: float = 1.0


ALWAYS = Shares()


class Schedule(NamedTuple):
    """The bundles of one operation.

    Attributes:
        bundles: how many there are.
        loops: in the order of their ends, so inner loops come first.
        regions: that branches may leave out, the guards of pipelines not among them.
    """

    bundles: int
    loops: tuple[Loop, ...]
    regions: tuple[Region, ...]

    @property
    def longest(self) -> Loop | None:
        """The loop with the most bundles: of a Pallas kernel its grid."""
        return max(self.loops, key=lambda x: x.bundles, default=None)

    @property
    def unknown(self) -> int:
        """How many loops run as often as the program decides: they count as one run."""
        return sum(loop.steps is None for loop in self.loops)

    def weights(self, shares: Shares = ALWAYS, steps: int | None = None) -> list[float]:
        """How often each bundle is issued.

        Args:
            shares: of the steps in which regions run; others than it names count as if
                they always ran.
            steps: of the grid, where they are known; None takes them from its test.
        """
        weights = [1.0] * self.bundles
        for loop in self.loops:
            known = steps if loop.grid and steps else loop.steps
            _multiply(weights, loop.first, loop.last, known or 1)
        inner = [region for region in self.regions if not region.end]
        longest = max(inner, key=lambda x: x.bundles, default=None)
        for region in self.regions:
            if region.end:
                _multiply(weights, region.first, region.last, shares.ends)
            elif region == longest:
                _multiply(weights, region.first, region.last, shares.longest)
        return weights


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
    # What holds most of a grid is guarded, though by a test of another form.
    regions = [x for x in regions if not (x.end and 2 * x.bundles > grid > 0)]
    return Schedule(len(rows), tuple(loops), tuple(regions))


def _multiply(weights: list[float], first: int, last: int, factor: int | float) -> None:
    for i in range(first, last + 1):
        weights[i] *= factor


def _at_an_end(tests: Mapping[str, str], test: str) -> bool:
    """Whether a branch leaves out what runs where an index equals a constant."""
    compared = "scmp.eq" if test.startswith("!") else "scmp.ne"
    asked = tests.get(test.lstrip("!"), "")
    return asked.startswith(compared) and re.search(r", -?\d+", asked) is not None


def _guards(tests: Mapping[str, str], test: str) -> bool:
    """Whether a branch leaves out all that a grid computes, at its pipeline's ends."""
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
    """The bundle at which each region begins."""
    found: dict[str, int] = {}
    for i, row in enumerate(rows):
        for region in _START.findall(row.text):
            found.setdefault(region, i)
    return found


def _loop(rows: Sequence[Row], first: int, branch: int, test: str) -> Loop:
    """The loop whose branch back stands in bundle `branch`."""
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
    """What the bundles of an operation use of the core.

    Attributes:
        units: the share of each unit's slots that is used, by its name.
        spills: bundles' stores of registers that were too few.
        fills: bundles' loads of them.
    """

    units: dict[str, float]
    spills: int
    fills: int


def read_use(text: str, weights: Sequence[int | float]) -> Use:
    """Reads a file of the use per bundle; `weights` says how often each is issued."""
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
