"""The benchmark of the ops: what it times agrees, and its numbers add up."""

import functools
import json

import jax.numpy as jnp
import pytest

import memjax_kernels
from experiments.ops import baselines, benchmark, cases, ways
from experiments.ops.cost import DEVICES

SMALL = (1, 40, 1, 16)


@pytest.fixture(name="report", scope="module")
def _report(tmp_path_factory):
    output = tmp_path_factory.mktemp("benchmark") / "kernels"
    config = benchmark.Config(
        ops=("trellis", "attention"),
        shapes=(SMALL,),
        lengths=(32,),
        chunk_size=16,
        repeats=1,
        output=output,
    )
    with pytest.MonkeyPatch.context() as patch:
        quick = functools.partial(benchmark.this_device, 128, 2**12)
        patch.setattr(benchmark, "this_device", quick)
        benchmark.main(config)
    assert output.with_suffix(".png").stat().st_size > 1000
    return json.loads(output.with_suffix(".json").read_text())


@pytest.mark.slow
def test_every_implementation_has_both_passes(report):
    found = {(r["op"], r["implementation"], r["pass"]) for r in report["shapes"]}
    ops = [("trellis", "reference"), ("trellis", "xla"), ("attention", "xla")]
    assert found == {(*op, p) for op in ops for p in ("forward", "both")}
    for row in report["shapes"]:
        assert row["tokens_per_s"] == pytest.approx(40 / row["median_s"])
        least = max(
            row["flops"] / report["peaks"]["flops"],
            row["bytes"] / report["peaks"]["bandwidth"],
        )
        assert row["times_roofline"] == pytest.approx(row["median_s"] / least)
    assert report["agreement"]["trellis 16"]["xla"] < 1e-4


def test_what_disagrees_is_not_timed(monkeypatch):
    config = benchmark.settle(benchmark.Config(shapes=(SMALL,), chunk_size=16))
    real = cases.forward

    def wrong(op, implementation, chunk_size):
        run = real(op, implementation, chunk_size)
        return (lambda *a: 1.01 * run(*a)) if implementation == "xla" else run

    monkeypatch.setattr(cases, "forward", wrong)
    shape, op = cases.Shape(*SMALL), "linear_attention"
    errors = ways.check_all([op], shape, config)[op]
    assert errors == {"reference": 0.0, "xla": "1.0e-02 from the token loop"}
    agreement = {f"{op} 16": errors}
    (_, found), *rest = ways.compile_all([(op, shape)], config, agreement)
    assert not rest and {name for name, _ in found} == {"reference"}


def test_a_baseline_that_fails_is_named():
    def fails():
        raise RuntimeError("wrong on this GPU\nand more")

    config = benchmark.settle(benchmark.Config(repeats=1))
    of = ("gla", cases.Shape(*SMALL), config, DEVICES["v5e"])
    theirs = {
        ("theirs", "forward"): ways.Way(lambda: None, None, False),
        ("theirs", "both"): ways.Way(fails, None, False),
    }
    rows, failed = ways.measure(*of, theirs)
    assert [(r["implementation"], r["pass"]) for r in rows] == [("theirs", "forward")]
    assert failed[0]["pass"] == "both"
    assert failed[0]["why"] == "RuntimeError: wrong on this GPU"
    with pytest.raises(RuntimeError, match="wrong on this GPU"):
        ways.measure(*of, {("xla", "both"): ways.Way(fails, None, True)})


@pytest.mark.slow
@pytest.mark.parametrize("op", [op for op in cases.ARGUMENTS if op != "attention"])
def test_every_op_takes_its_inputs_and_has_a_cost(op):
    shape = cases.Shape(1, 20, 2, 16)
    arrays = cases.inputs(op, shape, "float32")
    assert tuple(arrays) == cases.ARGUMENTS[op]
    y = cases.forward(op, "reference", 16)(*arrays.values())
    assert y.shape == (1, 20, 2, 16) and bool(jnp.isfinite(y).all())
    ahead, both = (
        cases.cost(op, shape, 16, "float32", backward) for backward in (False, True)
    )
    assert 0 < ahead.flops < both.flops and 0 < ahead.bytes < both.bytes


def test_every_op_with_tokens_is_in_the_benchmark():
    ops = {name for name in vars(memjax_kernels) if not name.startswith("_")}
    modules = {"arguments", "chunks", "cost", "implementations"}
    assert set(cases.ARGUMENTS) - {"attention"} <= ops - modules


def test_baselines_are_ops_of_ours():
    assert set(baselines.BASELINES) <= set(cases.ARGUMENTS)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"ops": ("gru",)}, r"ops must be of .*gru"),
        ({"beside": ("attention",)}, r"beside must be of .*attention"),
        ({"repeats": 0}, "at least 1"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        benchmark.Config(**options)
