"""Counting cycles: files of libtpu are read rightly."""

import re
from pathlib import Path

import pytest

from memjax.aot.cycles.attention import shares
from memjax.aot.cycles.bundles import Region, Shares, read_schedule, read_use
from memjax.aot.cycles.count import PROGRAM, count, span
from memjax.aot.cycles.program import read_program
from memjax.aot.cycles.text import read_blocks
from memjax.aot.cycles.traffic import traffic
from memjax.mechanisms import (
    AttentionConfig,
    ElasticMemoryConfig,
    MemorizingConfig,
    SlidingWindowConfig,
)

SNIPPETS = Path(__file__).parent / "snippets"
# A grid of 24 steps, in it a region for the first step of an axis and a loop of 7,
# in which there is one of 5; the test of the outer loop stands in the inner one.
GRID = (SNIPPETS / "grid_bundles.txt").read_text()
# As splash attention has it: only some steps compute.
COMPUTES = (SNIPPETS / "branch_bundles.txt").read_text()
USE = (SNIPPETS / "use.txt").read_text()
HLO = (SNIPPETS / "program_hlo.txt").read_text()
MOVES = (SNIPPETS / "traffic_hlo.txt").read_text()


def test_loops_run_as_often_as_their_own_tests_say():
    schedule = read_schedule(GRID)
    assert schedule.bundles == 27
    assert [(x.bundles, x.steps, x.grid) for x in schedule.loops] == [
        (5, 5, False),
        (9, 7, False),
        (25, 24, True),
    ]
    # 2 outside; 16 of the grid alone, 4 of the middle loop and 5 of the inner.
    assert sum(schedule.weights()) == 2 + 24 * (16 + 7 * (4 + 5 * 5))
    assert schedule.unknown() == 0


def test_the_end_of_an_axis_runs_in_a_share_of_the_steps():
    schedule = read_schedule(GRID)
    (region,) = schedule.regions
    assert (region.first, region.last, region.end) == (10, 11, True)
    saved = sum(schedule.weights()) - sum(schedule.weights(Shares(ends=1 / 4)))
    assert saved == pytest.approx(24 * 2 * 3 / 4)
    assert sum(schedule.weights(Shares(longest=0.5))) == sum(schedule.weights())


def test_a_region_that_computes_runs_in_a_share_of_the_steps():
    schedule = read_schedule(COMPUTES)
    assert sum(schedule.weights()) == 8 * 10
    assert sum(schedule.weights(Shares(longest=0.625))) == 8 * (9 + 0.625)
    # The compiler may know the steps of an operation's grid itself.
    assert sum(schedule.weights(steps=6)) == 6 * 10


def test_code_of_a_kind_of_step_runs_in_its_share():
    schedule = read_schedule(COMPUTES)
    assert sum(schedule.weights(Shares(bodies=[0.625]))) == 8 * (9 + 0.625)
    (region,) = schedule.regions
    # Also where one has most of the grid, and would be a guard.
    guard, other = region._replace(last=8), region._replace(first=1, last=2)
    two = schedule._replace(regions=(other,), guards=(guard,))
    share = Shares(0.0, 0.0, bodies=[0.25, 0.5])
    assert sum(two.weights(share)) == 8 * (10 - 2 * 0.75 - 3 * 0.5)


def test_a_loop_without_a_bound_counts_once():
    schedule = read_schedule(COMPUTES.replace("%s17, 10 /*", "%s17, %s18 /*"))
    assert schedule.unknown() == 1 and sum(schedule.weights()) == 10
    # Nor is it named where it never runs.
    (loop,) = schedule.loops
    never = schedule._replace(regions=(Region(loop.first, loop.last, end=False),))
    assert never.unknown(Shares(longest=0.0)) == 0


def test_use_is_weighted_by_how_often_a_bundle_is_issued():
    use = read_use(USE, [1, 1, 2])
    assert use.units == {"MXU": 0.25, "VALU": 0.125, "VLOAD": 0.5, "VSTORE": 0.25}
    assert (use.spills, use.fills) == (1, 2)
    with pytest.raises(ValueError, match="weights must be 3, one a bundle, got 2"):
        read_use(USE, [1, 1])


def test_operations_run_as_often_as_their_loops():
    program = read_program(HLO)
    runs = [x.times for x in program.operations if x.name == "fusion.2"]
    assert runs == [37, 3, 1] and program.loops == ("while.3",)
    fusion = next(x for x in program.operations if x.name == "fusion.2")
    assert (fusion.estimate, fusion.steps, fusion.source) == (100, 6, "while/add")
    assert {x.name for x in program.operations if x.moves} == {"fusion.1"}
    assert [x.name for x in program.operations if x.kernel] == ["kernel.1", "kernel.2"]
    flag, conditional = program.conditionals
    assert len(conditional.branches) == 2
    # A loop that ends by a flag: not at all, or once.
    nothing, once = flag.branches
    assert not nothing.operations
    assert [x.times for x in once.operations if x.name == "copy.4"] == [1]
    with pytest.raises(ValueError, match="text must have an ENTRY computation"):
        read_program("HloModule nothing")


@pytest.fixture(name="folder")
def _folder(tmp_path):
    """A compiled program: one kernel's file serves both calls, which are alike."""
    (tmp_path / PROGRAM).write_text(HLO)
    # Computed for the test: as many bundles as the use has rows.
    short = "\n".join(f"   0x{i}   :  {{}}" for i in range(3))
    for name, text in (("kernel.1", short), ("fusion.2", GRID), ("copy.1", short)):
        (tmp_path / f"17-{name}-03-final_bundles.txt").write_text(text)
        (tmp_path / f"17-{name}-02-schedule-analysis_final_bundles.txt").write_text("")
        use = f"17-{name}-01-final_hlo-static-per-bundle-utilization.txt"
        (tmp_path / use).write_text(USE)
    return tmp_path


def counted(folder: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in count(folder).parts:
        name = part.operation.name
        found[name] = found.get(name, 0) + part.cycles
    return found


def test_cycles_are_bundles_or_the_estimate_where_that_is_more(folder):
    one = 2 + 6 * (16 + 7 * (4 + 5 * 5))  # The grid has 2 x 3 steps.
    expected = {"kernel.1": 3, "kernel.2": 3, "fusion.1": 20, "fusion.2": 41 * one}
    # The cheaper branch, by its estimate: it has fewer bundles.
    assert counted(folder) == expected | {"copy.1": 7}
    found = count(folder)
    assert found.dearest == 43 + 1000 and found.uncounted == ("sort.1",)
    (kernel,) = found.kernels
    assert (kernel.name, kernel.cycles, kernel.use.spills) == ("kernel.1", 3, 1)


def test_a_kernel_takes_as_long_as_the_bytes_that_it_says_it_moves(folder):
    text = (folder / PROGRAM).read_text()
    says = ', backend_config={"cost_estimate":{"bytes_accessed":"40"}}'
    text = re.sub(r"(%kernel.1 = .*)", rf"\g<1>{says}", text)
    (folder / PROGRAM).write_text(text)
    for speed, expected in ((4.0, 10), (20.0, 3)):
        parts = count(folder, bytes_per_cycle=speed).parts
        (kernel,) = (x for x in parts if x.operation.name == "kernel.1")
        assert kernel.cycles == expected and kernel.scheduled == (expected == 3)


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("add", 3 * 4 * 256),  # Two arrays are read, one is written.
        ("on_chip", 2 * 256),  # The result stays in the core, the operand is bfloat16.
        ("sliced", 4 * (32 + 32)),  # One row of the eight.
        ("updated", 4 * (32 + 32)),  # One row of the eight, and a slice of the other.
        ("both", 4 * 256 + 256),  # An addition and its signs.
        ("row", 4 * 2 * 32),
        ("placed", 4 * 2 * 32),
    ],
)
def test_bytes_of_an_operation_are_those_that_it_reads_and_writes(name, least):
    blocks, entry = read_blocks(MOVES)
    assert entry == "main"
    assert traffic(blocks, entry, blocks[entry][name]) == least


def test_an_operation_of_xla_is_a_range_and_a_kernel_is_not(folder):
    found = {p.operation.name: p for p in count(folder, bytes_per_cycle=64.0).parts}
    kernel, moves = found["kernel.1"], found["fusion.1"]
    assert (kernel.least, kernel.cycles) == (3, 3)
    # 1,024 bytes read and as many written, at 64 a cycle; the estimate is 20.
    assert (moves.least, moves.cycles) == (20, 20)
    found = {p.operation.name: p for p in count(folder, bytes_per_cycle=256.0).parts}
    assert (found["fusion.1"].least, found["fusion.1"].cycles) == (8, 20)
    counted = count(folder, bytes_per_cycle=256.0)
    # And 3 of a copy.
    assert counted.cycles - counted.least == 12 + 3
    assert (span(8.0, 20.0), span(8.04, 7.96, digits=1)) == ("8 to 20", "8.0")


def test_loops_whose_length_a_run_finds_are_named(folder):
    assert count(folder).unknown == ("while.3",)
    (file,) = folder.glob("*kernel.1-03-final_bundles.txt")
    file.write_text(
        "   0x0 LB: > { %s2 = smov 0 } /* Start region 9 */\n"
        "   0x1   : > { %p1 = scmp.ge.s32.totalorder %s3, %s4 /* loop exit test */ }\n"
        "   0x2   : > { %5 = sbr.rel (!%p1) target = $region9 }\n"
    )
    counted = count(folder)
    # The second call has no file of its own, and the same schedule.
    assert counted.unknown == ("while.3", "kernel.1", "kernel.2")
    assert [(x.unknown, x.steps, x.cycles) for x in counted.kernels] == [(1, 1, 3)]


def test_kernels_of_attention_have_shares_of_their_kinds_of_steps():
    heads = (128, 2, 2, 64)
    local = SlidingWindowConfig(*heads, window=600)
    found = shares([AttentionConfig(*heads), local], 4096)
    # Four blocks, with themselves and six pairs; a window reaches into the next.
    assert found["causal_attention_forward"] == Shares(0.4, 0.0, (0.4, 0.6))
    name = "causal_attention_backward_window_600"
    assert found[name] == Shares(4 / 7, 1.0, (4 / 7, 3 / 7))


def test_attention_inside_of_blocks_is_that_of_rows_as_long():
    heads = (128, 2, 2, 64)
    inside = shares([MemorizingConfig(*heads, block=512)], 2048)
    assert inside == shares([AttentionConfig(*heads)], 512) != {}
    for kind in (ElasticMemoryConfig, MemorizingConfig):
        # No kernel takes blocks of half a vector's lanes.
        assert shares([kind(*heads, block=64)], 2048) == {}
