"""Counting cycles: what libtpu writes is read rightly, and kernels do not get slower."""

import dataclasses
import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

from experiments.common.results import RESULTS
from experiments.ops import tpu_cycles
from experiments.ops.cycles.bundles import Shares, read_schedule, read_use
from experiments.ops.cycles.case import Case, Program
from experiments.ops.cycles.cases import CASES
from experiments.ops.cycles.compile import Facts, compile_case
from experiments.ops.cycles.count import PROGRAM, Count, count
from experiments.ops.cycles.program import read_program
from experiments.ops.cycles.report import entry

LIBTPU = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(
    not LIBTPU, reason="compiling for a TPU takes libtpu (pip install memjax[tpu])"
)

# A grid of 24 steps, in it a region for the first step of an axis and a loop of 7,
# in which there is one of 5; the test of the outer loop stands in the inner one.
GRID = """
= control target key start
LB: loop body
     0   :  { %s1 = smov 0 } /* Start region 1 */
   0x1 LB: > { %s2 = sphi %s1, %s17 /* iteration index, stage = 0 */ } /* Start region 9
second line of a comment */
   0x2   : > { %p10 = scmp.ge.s32.totalorder %s2, 1  ;;  %p11 = scmp.lt.s32.totalorder %s2, 25 }
   0x3   : > { %p12 = pnand %p10, %p11 }
   0x4   : > { %129 = sbr.rel (%p12) target = $region24 }
   0x5   : > { %p13 = scmp.ne.s32.totalorder %s3, 0  ;;  %130 = sbr.rel (%p13) target = $region32 }
   0x6   : > {}
   0x7   : > {}
   0x8   : > {}
   0x9   : > {}
   0xa   : > { %176 = vst [vmem:[#allocation2]] %v0 }
   0xb   : > { %177 = vst [vmem:[#allocation2]] %v1 }
   0xc PF: > { %s21 = smov 0 } /* Start/End empty region 32 */
   0xd LB: >> { %s22 = smov 0 } /* Start region 98 */
   0xe LB: >>> { %v1 = vtanh.f32 %v2 } /* Start region 87 */
   0xf   : >>> { %p5 = scmp.ge.s32.totalorder %s22, 5 /* loop exit test */ }
  0x10   : >>> { %p6 = scmp.ge.s32.totalorder (%p5), %s21, 7 /* loop exit test */ }
  0x11   : >>> { %219 = sbr.rel (!%p5) target = $region87 }
  0x12   : >>> { %v3 = vadd.f32 %v1, %v2 }
  0x13   : >> { %301 = vmatmul.f32 %v3 }
  0x14   : >> { %197 = sbr.rel (!%p6) target = $region98 }
  0x15   : >> { %v4 = vpop.f32.mrf.mxu0 }
  0x16 PF: > { %s17 = sadd.s32 1, %s2 } /* Start/End empty region 24 */
  0x17   : > { %p14 = scmp.ge.s32.totalorder %s17, 26 /* loop exit test */ }
  0x18   : > { %16 = sbr.rel (!%p14) target = $region9 }
  0x19   : > { %s18 = smov 0 }
  0x1a   :  { %20 = vsyncpa 1 } /* End region 1 */
"""

# As splash attention has it: only some steps compute.
COMPUTES = """
     0 LB: > { %s2 = sphi %s1, %s17 /* iteration index, stage = 0 */ } /* Start region 9 */
   0x1   : > { %p3 = scmp.le.s32.totalorder %s4, 0  ;;  %1 = sbr.rel (%p3) target = $region3 }
   0x2   : > {}
   0x3   : > {}
   0x4   : > {}
   0x5   : > {}
   0x6   : > { %v1 = vadd.f32 %v2, %v2 }
   0x7   : > { %v3 = vadd.f32 %v1, %v2 } /* Start region 3 */
   0x8   : > { %p14 = scmp.ge.s32.totalorder %s17, 10 /* loop exit test */ }
   0x9   : > { %16 = sbr.rel (!%p14) target = $region9 }
"""

USE = """== CAPACTIY:
MXU, VALU, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL
    4     2     3     3     1     1
== UTILIZATION:
4 0 0 0 0 0
0 1 0 0 1 1
0 0 3 2 0 0
== END
"""

HLO = """HloModule jit_f, is_scheduled=true

%moving (p: bf16[8,64]) -> bf16[64,8] {
  %p = bf16[8,64]{1,0} parameter(0)
  %slice.1 = bf16[8,64]{1,0} slice(%p), slice={[0:8], [0:64]}
  ROOT %transpose.1 = bf16[64,8]{1,0} transpose(%slice.1), dimensions={1,0}
}

%adding (p.1: bf16[8,64]) -> bf16[8,64] {
  %p.1 = bf16[8,64]{1,0} parameter(0)
  ROOT %add.1 = bf16[8,64]{1,0} add(%p.1, %p.1)
}

%body (arg: (s32[], bf16[8,64])) -> (s32[], bf16[8,64]) {
  %arg = (s32[]{:T(128)}, bf16[8,64]{1,0}) parameter(0)
  %x = bf16[8,64]{1,0} get-tuple-element(%arg), index=1
  %fusion.2 = bf16[8,64]{1,0:T(8,128)(2,1)} fusion(%x), kind=kLoop, calls=%adding, metadata={op_name="jit(f)/while/body/closed_call/add" stack_frame_id=1}, backend_config={"window_config":{"estimated_cycles":"100","iteration_bounds":["2","3"]}}
  ROOT %tuple.1 = (s32[]{:T(128)}, bf16[8,64]{1,0}) tuple(%x, %fusion.2)
}

%condition (arg.1: (s32[], bf16[8,64])) -> pred[] {
  %constant.1 = s32[]{:T(128)} constant(37)
  %arg.1 = (s32[]{:T(128)}, bf16[8,64]{1,0}) parameter(0)
  ROOT %lt.1 = pred[]{:T(512)} compare(%arg.1, %constant.1), direction=LT
}

%never (arg.2: (s32[], bf16[8,64])) -> pred[] {
  %arg.2 = (s32[]{:T(128)}, bf16[8,64]{1,0}) parameter(0)
  ROOT %lt.2 = pred[]{:T(512)} compare(%arg.2, %arg.2), direction=LT
}

%cheap (b: bf16[8,64]) -> bf16[8,64] {
  ROOT %copy.1 = bf16[8,64]{1,0} copy(%b), backend_config={"estimated_cycles":"7"}
}

%dear (c: bf16[8,64]) -> bf16[8,64] {
  ROOT %copy.2 = bf16[8,64]{0,1} copy(%c), backend_config={"estimated_cycles":"50"}
}

ENTRY %main (q: bf16[8,64]) -> bf16[8,64] {
  %q = bf16[8,64]{1,0} parameter(0)
  %fusion.1 = bf16[64,8]{1,0} fusion(%q), kind=kLoop, calls=%moving, backend_config={"estimated_cycles":"20"}
  %kernel.1 = (bf16[8,64]{1,0}, f32[8]{0}) custom-call(%q, /*index=1*/%fusion.1), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/kernel/pallas_call"}
  %kernel.2 = (bf16[8,64]{1,0}, f32[8]{0}) custom-call(%q, /*index=1*/%q), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/other/pallas_call"}
  %while.1 = (s32[]{:T(128)}, bf16[8,64]{1,0}) while(%tuple.0), condition=%condition, body=%body
  %while.2 = (s32[]{:T(128)}, bf16[8,64]{1,0}) while(%tuple.0), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %while.3 = (s32[]{:T(128)}, bf16[8,64]{1,0}) while(%tuple.0), condition=%never, body=%body
  %sort.1 = bf16[8,64]{1,0} sort(%q), dimensions={1}
  ROOT %conditional.1 = bf16[8,64]{1,0} conditional(%s, %q, %q), branch_computations={%dear, %cheap}
}
"""  # fmt: skip


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
    assert schedule.unknown == 0


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


def test_a_loop_without_a_bound_counts_once():
    schedule = read_schedule(COMPUTES.replace("%s17, 10 /*", "%s17, %s18 /*"))
    assert schedule.unknown == 1 and sum(schedule.weights()) == 10


def test_use_is_weighted_by_how_often_a_bundle_is_issued():
    use = read_use(USE, [1, 1, 2])
    assert use.units == {"MXU": 0.25, "VALU": 0.125, "VLOAD": 0.5, "VSTORE": 0.25}
    assert (use.spills, use.fills) == (1, 2)
    with pytest.raises(ValueError, match="weights must be 3, one a bundle, got 2"):
        read_use(USE, [1, 1])


def test_operations_run_as_often_as_their_loops():
    program = read_program(HLO)
    runs = [x.times for x in program.operations if x.name == "fusion.2"]
    assert runs == [37, 3, 1] and program.unknown == 1
    fusion = next(x for x in program.operations if x.name == "fusion.2")
    assert (fusion.estimate, fusion.steps, fusion.source) == (100, 6, "while/add")
    assert {x.name for x in program.operations if x.moves} == {"fusion.1"}
    assert [x.name for x in program.operations if x.kernel] == ["kernel.1", "kernel.2"]
    assert len(program.conditionals[0].branches) == 2
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
    assert found.dearest == 43 and found.uncounted == ("sort.1",)
    (kernel,) = found.kernels
    assert (kernel.name, kernel.cycles, kernel.use.spills) == ("kernel.1", 3, 1)


def test_an_entry_adds_up(folder):
    case = Case(lambda: Program(lambda: None, ()), units=10, unit="token")
    found = count(folder)
    row = entry(case, found, Facts(197e12, 819e9, 5, {}))
    assert row["cycles"] == pytest.approx(found.cycles / 10)
    parts = row["kernels"] + row["copies"] + row["other"]
    assert parts == pytest.approx(row["cycles"], abs=1e-3)
    assert row["kernels"] == 0.6 and row["copies"] == 2.7
    assert row["memory_ns"] == row["product_ns"] == 1e8
    assert row["times_limit"] == 1 and row["temporary_bytes"] == 5
    assert row["dearest"][0]["operation"] == "fusion"
    assert row["dearest"][0]["runs"] == 41


def test_cases_that_are_counted_are_kept_unless_named():
    config = tpu_cycles.Config()
    done = {"trellis/c64/forward": {}}
    assert tpu_cycles.chosen(config, done) == [n for n in CASES if n not in done]
    config = dataclasses.replace(config, only=("trellis/c64/forward", "ssd"))
    names = ["trellis/c64/forward", "ssd/forward", "ssd/both"]
    assert tpu_cycles.chosen(config, done) == names
    with pytest.raises(ValueError, match="only must be one of .*got 'trellis/c65'"):
        tpu_cycles.Config(only=("trellis/c65",))


def test_results_are_written_case_by_case(tmp_path, monkeypatch, capsys):
    row = entry(CASES["gla/forward"], Count((), 0.0, (), (), 0), Facts(1.0, 1.0, 0, {}))

    def fake(name, keep):
        if name == "ssd/forward":
            raise RuntimeError("ssd/forward does not compile: no reason")
        return row | {"name": name}

    monkeypatch.setattr(tpu_cycles, "count_case", fake)
    output = tmp_path / "cycles"
    for only in ("gla", "ssd"):
        tpu_cycles.main(tpu_cycles.Config(only=(only,), output=output))
    cases = json.loads(output.with_suffix(".json").read_text())["cases"]
    assert list(cases) == ["gla/forward", "gla/both", "ssd/both"]
    assert cases["gla/both"]["name"] == "gla/both"
    assert "ssd/forward does not compile: no reason" in capsys.readouterr().out


@needs_libtpu
@pytest.mark.slow
def test_known_loops_are_counted(tmp_path, monkeypatch):
    """A kernel's grid of 24 steps with loops of 7 and 5, and a scan of 37 steps."""
    here = [str(Path(__file__).parent), str(Path(__file__).parents[3]), *sys.path]
    monkeypatch.setenv("PYTHONPATH", ":".join(here))
    compile_case("known_loops", "kernel", tmp_path)
    (kernel,) = count(tmp_path).kernels
    assert kernel.steps == math.prod((4, 6))
    (file,) = tmp_path.glob("*known_loops*[0-9]-final_bundles.txt")
    steps = [loop.steps for loop in read_schedule(file.read_text()).loops]
    assert steps == [5, 7, 24]
    (scanned := tmp_path / "scan").mkdir()
    compile_case("known_loops", "scan", scanned)
    found = count(scanned)
    products = [x.operation for x in found.parts if "dot_general" in x.operation.source]
    assert {x.times for x in products} == {37} and not found.unknown
    # The branch with the products is the dearer one.
    assert found.dearest > 0


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("op", ["trellis", "lattice"])
def test_kernels_do_not_get_slower(op):
    """Cycles rise by at most 10% over those that are committed."""
    name = f"{op}/c64/small/forward"
    committed = json.loads((RESULTS / "ops" / "tpu_cycles.json").read_text())["cases"]
    found = tpu_cycles.count_case(name)
    assert found["cycles"] <= 1.1 * committed[name]["cycles"]
    assert found["kernels"] <= 1.1 * committed[name]["kernels"]
