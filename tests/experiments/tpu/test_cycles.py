"""Counted cycles: entries add up, kernels are not slower."""

import importlib.util
import json

import pytest

from experiments.lab.results import RESULTS
from experiments.tpu import cycles
from experiments.tpu.case import Case, Program
from experiments.tpu.compile import Facts, entry
from experiments.tpu.cycles import CASES
from memjax.aot.chips import CHIPS
from memjax.aot.cycles.count import Count, Part
from memjax.aot.cycles.program import Operation


def test_an_entry_adds_up():
    def part(cycles, kernel=False, moves=False):
        add = Operation("add.1", "fusion", kernel, moves, None, 0, None, 1, "jit", "")
        return Part(add, cycles / (1 if kernel else 2), cycles, True)

    parts = (part(6, kernel=True), part(26, moves=True), part(10))
    row = entry(
        Case(lambda: Program(lambda: None, ()), units=10, unit="token"),
        Count(parts, 43.0, (), (), ()),
        Facts(197e12, 819e9, 5, {}),
    )
    assert (row["cycles"], row["kernels"]) == ([2.4, 4.2], [0.6, 0.6])
    assert (row["copies"], row["other"]) == ([1.3, 2.6], [0.5, 1.0])
    assert row["dearest_branches"] == 4.3
    assert row["memory_cycles"] == CHIPS["v5e"].clock / 10
    assert row["times_limit"] == [1, 1] and row["temporary_bytes"] == 5
    low, high = row["flop_utilisation"]
    assert high / low == pytest.approx(4.2 / 2.4)
    (dearest,) = row["dearest"]
    assert dearest["operation"] == "add" and dearest["cycles"] == [2.4, 4.2]


def test_a_table_shows_ranges_and_names_old_numbers_estimates():
    assert cycles.cycles_of({"cycles": [2.4, 4.24]}, 1) == "2.4 to 4.2"
    assert cycles.cycles_of({"cycles": [4.2, 4.24]}, 1) == "4.2"
    assert cycles.cycles_of({"cycles": 4.24}, 1) == "4.2 (estimate)"
    cases = {"a": ["while.3", "scatter"], "b": [], "c": 0}
    rows = {x: {"commit": "1", "unknown_loops": loops} for x, loops in cases.items()}
    counted_at, loops = cycles.notes(rows)
    assert counted_at == "counted at 1"
    assert loops == "a: a run finds the loops of while.3, scatter, counted once"


def test_programs_of_attention_take_flat_tokens():
    program = CASES["attention/d64/t2048/both"].build()
    assert {x.shape for x in program.arguments} == {(1, 2048, 12 * 64)}


def test_results_are_written_case_by_case_and_kept(tmp_path, monkeypatch, capsys):
    row = entry(
        CASES["gla/forward"], Count((), 0.0, (), (), ()), Facts(1.0, 1.0, 0, {})
    )

    def fake(name, keep):
        if name == "gdn2/forward":
            raise RuntimeError("gdn2/forward does not compile: no reason")
        return row | {"name": name}

    monkeypatch.setattr(cycles, "count_case", fake)
    output = tmp_path / "cycles"
    for only in ("ttt_linear/c16", "gdn2"):
        cycles.main(only=(only,), output=output)
    cases = json.loads(output.with_suffix(".json").read_text())["cases"]
    names = ["gdn2/both", "ttt_linear/c16/forward", "ttt_linear/c16/both"]
    assert list(cases) == names and cases[names[0]]["name"] == names[0]
    assert cycles.chosen((), cases) == [n for n in CASES if n not in names]
    assert "gdn2/forward does not compile: no reason" in capsys.readouterr().out


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="compiling for a TPU takes libtpu (pip install libtpu)",
)
@pytest.mark.slow
@pytest.mark.parametrize("op", ["trellis/c64", "lattice-dec/c64"])
def test_kernels_do_not_get_slower(op):
    """Cycles rise by at most 10% over those that are committed."""
    name = f"{op}/small/forward"
    committed = json.loads((RESULTS / "tpu" / "cycles.json").read_text())["cases"]
    found = cycles.count_case(name)
    assert not found["unknown_loops"]
    for part in ("cycles", "kernels"):
        assert found[part][1] <= 1.1 * committed[name][part][1]
    one_pack = {op.replace("-", "/").split("/")[0]: {"packs": 1}}
    assert cycles.count_case(name, sizes=one_pack)["cycles"] != found["cycles"]
