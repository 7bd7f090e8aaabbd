"""The benchmark of the ops times what agrees with the token loop, and adds up."""

import functools
import json
from typing import Any

import pytest

from experiments.lab import ops as lab
from experiments.lab.ops import Shape
from experiments.speed import ops

SMALL = (1, 40, 1, 16, 0)


@pytest.mark.slow
def test_every_implementation_has_both_passes(tmp_path, monkeypatch):
    quick = functools.partial(ops.this_device, 128, 2**12)
    monkeypatch.setattr(ops, "this_device", quick)
    given: Any = dict(chunk_size=16, repeats=1, output=tmp_path / "ops")
    config = ops.Config(("trellis", "attention"), (SMALL,), **given)
    assert ops.main(config) == 0
    report = json.loads((tmp_path / "ops.json").read_text())
    found = {(r["op"], r["implementation"], r["pass"]) for r in report["shapes"]}
    pairs = [("trellis", "reference"), ("trellis", "xla"), ("attention", "xla")]
    assert found == {(*pair, p) for pair in pairs for p in ("forward", "both")}
    for row in report["shapes"]:
        moved = row["bytes"] / report["peaks"]["bandwidth"]
        least = max(row["flops"] / report["peaks"]["flops"], moved)
        assert row["times_roofline"] == pytest.approx(row["median_s"] / least)
    assert report["agreement"]["trellis 16"]["xla"] < 1e-4


def test_implementation_that_disagrees_is_not_timed(monkeypatch):
    config = ops.Config(shapes=(SMALL,), chunk_size=16)
    real = lab.forward

    def wrong(op, implementation, chunk_size):
        run = real(op, implementation, chunk_size)
        return (lambda *a: 1.01 * run(*a)) if implementation == "xla" else run

    monkeypatch.setattr(lab, "forward", wrong)
    monkeypatch.setattr(lab, "IMPLEMENTATIONS", ("reference", "xla"))
    shape, op = Shape(*SMALL), "linear_attention"
    found = ops.agreement(op, shape, config)
    assert found == {"reference": 0.0, "xla": "1.0e-02 from the token loop"}
    calls = ops.compiled_calls(op, shape, config, found)
    assert {name for name, _ in calls} == {"reference"}
