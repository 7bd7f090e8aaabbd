"""The command aot: statistics of the compiler, and the search."""

import importlib.util
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memjax.aot import libtpu
from memjax.aot.chips import CHIPS
from memjax.aot.collectives import collectives
from memjax.aot.compile import Compiled, Request
from memjax.aot.report import exhausted, lines, report
from memjax.aot.search import Probe, largest
from memjax.training.config import presets
from memjax.training.monitoring.device_peaks import GIB
from tests.cli.commands import refused

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="compiling for a TPU takes libtpu (pip install libtpu)",
)

PROGRAM = """\
%fused.1 (p: bf16[32,8]) -> bf16[128,8] {
  %p = bf16[32,8]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[128,8]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=7
}

%fused.2 (p: bf16[32,8]) -> bf16[128,8] {
  %p.1 = bf16[32,8]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[128,8]{1,0:T(8,128)(2,1)} all-gather(%p.1), channel_id=7
}

%body (p: (s32[], f32[16])) -> (s32[], f32[16]) {
  %p.2 = (s32[], f32[16]{0}) parameter(0)
  %x = f32[16]{0} get-tuple-element(%p.2), index=1
  %sum = (f32[]{:T(128)}, f32[16]{0}) all-reduce(%x), channel_id=8
  ROOT %t = (s32[], f32[16]{0}) tuple(%x)
}

%condition (p: (s32[], f32[16])) -> pred[] {
  ROOT %p.3 = (s32[], f32[16]{0}) parameter(0)
}

ENTRY %main (a: bf16[32,8], b: f32[16]) -> bf16[128,8] {
  %a = bf16[32,8]{1,0} parameter(0)
  %b = f32[16]{0} parameter(1)
  %w = (s32[], f32[16]{0}) while(%b), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %send = (f32[4,2]{1,0}, f32[4,2]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%b), channel_id=9
  %start = bf16[128,8]{1,0} fusion(%a), kind=kCustom, calls=%fused.1
  ROOT %done = bf16[128,8]{1,0} fusion(%start), kind=kCustom, calls=%fused.2
}
"""  # noqa: E501


def test_collectives_are_counted_once_a_channel_and_as_often_as_loops_run():
    found = {row.kind: row[1:] for row in collectives(PROGRAM)}
    assert found == {
        "all-gather": (1, 128 * 8 * 2, 128 * 8 * 2),
        "all-reduce": (5, 5 * 17 * 4, 17 * 4),
        "collective-permute": (1, 4 * 2 * 4, 4 * 2 * 4),
    }


TEMPORARIES = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
    "temporaries (38.89G) exceeds available HBM (15.75G)."
)
ALTOGETHER = """\
RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space \
hbm. Used 21.50G of 15.75G hbm. Exceeded hbm capacity by 5.75G.
Total hbm usage >= 21.75G:
    reserved        258.00M
    program          21.50G
Largest program allocations in hbm:
  1. Size: 12.00G
     Operator: op_name="jit(step)/dot_general"
     Shape: f32[32768,98304]{1,0:T(8,128)}
  2. Size: 500.0M
     Operator: op_name="jit(step)/exp"
     Shape: f32[1024,128000]{1,0:T(8,128)}
"""


def test_step_that_does_not_fit_names_the_largest_part():
    facts = {"arguments": {"parameters": GIB, "batch": 10}, "exhausted": TEMPORARIES}
    found = exhausted(facts, CHIPS["v5e"])
    assert found["largest"] == "temporaries"
    assert found["total"] == round(38.89 * GIB) + GIB + 10
    assert found["capacity"] == round(15.75 * GIB)

    found = exhausted(facts | {"exhausted": ALTOGETHER}, CHIPS["v5e"])
    assert found["total"] == round(21.5 * GIB)
    assert found["parts"]["temporaries"] == round(20.5 * GIB) - 10
    assert [row["bytes"] for row in found["buffers"]] == [12 * GIB, 500 * 2**20]
    assert found["buffers"][0]["operation"] == "jit(step)/dot_general"


def test_table_of_a_step_that_does_not_fit_names_the_largest_part():
    facts = {
        "arguments": {"parameters": GIB},
        "host_arguments": 3 * GIB,
        "exhausted": ALTOGETHER,
        "devices": 4,
        "mesh": {"data": 1, "fsdp": 4, "tensor": 1},
        "tokens": 8,
    }
    request = Request(presets()["transformer-tiny"], "train", "v5e:2x2")
    found = report(request, Compiled(facts, "", None))
    assert not found["fits"]
    rows = dict(lines(found))
    assert rows["does not fit"] == "the largest are temporaries"
    assert rows["memory a device"] == "21.50 GiB of 15.75 GiB"
    assert rows["on the host, a device"] == "3.00 GiB"


@given(
    edge=st.integers(0, 300),
    start=st.integers(1, 300),
    bend=st.floats(0.5, 2),
    says=st.booleans(),
)
def test_the_search_finds_the_edge(edge, start, bend, says):
    def probe(size):
        asked.append(size)
        needed = int(1000 * (size / (edge + 1)) ** bend)
        return Probe(size <= edge, needed if says else None, 1000)

    asked = []
    found = largest(probe, start, 300)
    assert found.fits == edge
    assert found.fails == (None if edge == 300 else edge + 1)
    assert {*asked} == {*found.probes} and len(asked) == len({*asked})
    assert len(asked) <= 30


def test_linear_memory_needs_few_compilations():
    def probe(size):
        return Probe(200 + 7 * size <= 16_000, 200 + 7 * size, 16_000)

    found = largest(probe, 8, 2**16)
    assert (found.fits, found.fails) == (2257, 2258) and len(found.probes) <= 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--topology v9:2x2", "must be a chip and its grid, such as v5e:2x2"),
        ("--topology v5e", "must be a chip and its grid"),
        ("--topology v5e:2x2 --backbone elastic-tiny", "for a fine-tuning only"),
    ],
)
def test_bad_input_is_refused_before_anything_is_compiled(words, message, monkeypatch):
    monkeypatch.setattr(libtpu, "run", lambda *_, **__: pytest.fail("compiled"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert message in refused("aot", "transformer-tiny", *words.split())


def test_missing_libtpu_names_the_install_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = refused("aot", "transformer-tiny", "--topology", "v5e:2x2")
    assert "pip install libtpu" in said


def test_fine_tuning_needs_the_backbones_sizes(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    words = ("hmt-tiny", "--topology", "v5e:2x2")
    assert "must be a preset of `memjax train`" in refused("aot", *words)
    assert "no config.json" in refused("aot", *words, "--backbone", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert "model_type" in refused("aot", *words, "--backbone", str(tmp_path))


@pytest.mark.parametrize(("temporaries", "fits"), [(14, True), (16, False)])
def test_a_compiled_step_above_the_capacity_does_not_fit(temporaries, fits):
    sizes = ("argument", "output", "alias", "generated_code")
    facts = {f"{name}_bytes": 0 for name in sizes}
    facts |= {"temp_bytes": temporaries * GIB, "arguments": {"parameters": GIB}}
    facts |= {"devices": 4, "mesh": {"fsdp": 4}, "tokens": 8, "host_arguments": 0}
    facts |= {"flops": 5.0, "bytes_accessed": 1.0}
    facts |= {"seconds": {"trace": 0.1, "lower": 0.1, "compile": 0.1}}
    request = Request(presets()["transformer-tiny"], "train", "v5e:2x2")
    found = report(request, Compiled(facts, "", None))
    assert found["fits"] == fits
    rows = dict(lines(found))
    assert rows.get("does not fit") == (None if fits else "the largest are temporaries")
    assert rows["operations a device"].startswith("5,")


def test_the_dearest_operations_are_printed():
    speed = {"cycles": [10.0, 30.0], "seconds": [0.25, 0.5], "utilisation": None}
    speed |= {"tokens_per_second": [2.0, 6.0], "loops_of_unknown_length": []}
    dearest = [("dot.1", "layer/dot", 20.0), ("copy.2", "", 5.0)]
    speed["dearest"] = [
        {"operation": name, "source": source, "cycles": [5.0, most]}
        for name, source, most in dearest
    ]
    sizes = {"total": GIB, "capacity": 2 * GIB, "parts": {}, "host": 0}
    found = {"devices": 1, "mesh": {}, "tokens": 8, "fits": True, "memory": sizes}
    found |= {"compiler": {"flops": None}, "collectives": [], "links_seconds": 0.0}
    found["seconds"] = {"trace": 5.37, "lower": 1.0}
    rows = [*lines(found | {"speed": speed})]
    assert ("compiling took", "trace 5.4 s, lower 1.0 s") in rows
    at = rows.index(("counted cycles", "10 to 30: 0.250 to 0.500 s"))
    assert rows[at + 1 : at + 3] == [
        ("  dot.1", "5 to 20, layer/dot"),
        ("  copy.2", "5, no name"),
    ]
