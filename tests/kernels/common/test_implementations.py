"""The choice of the code that runs: never wrong in silence."""

import inspect
import logging

import jax
import pytest
from jax.sharding import PartitionSpec

from memjax_kernels.common import implementations

choose = inspect.unwrap(implementations.choose)
HERE = {"pallas_tpu": "it needs a tpu", "xla": "", "reference": ""}
ON_TPU = {"reference": "", "xla": "", "pallas_tpu": ""}


@pytest.fixture
def on_tpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def test_none_is_the_fastest_that_runs():
    assert choose("gla", None, HERE) == "xla"
    assert choose("gla", None, HERE | {"xla": "too wide"}) == "reference"


def test_a_kernel_comes_first_where_it_runs(on_tpu):
    assert choose("gla", None, ON_TPU) == "pallas_tpu"
    assert implementations.needs("tpu") == ""


def test_a_fall_through_says_why_in_the_debug_log(on_tpu, caplog):
    with caplog.at_level(logging.DEBUG, logger="memjax_kernels.common.implementations"):
        chosen = choose("gla", None, ON_TPU | {"pallas_tpu": "slots above 256"})
    assert chosen == "xla"
    assert caplog.messages == ["gla falls through pallas_tpu: slots above 256"]


def test_a_kernel_is_not_picked_where_xla_would_have_to_partition_it(
    on_tpu, monkeypatch, caplog
):
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    with caplog.at_level(logging.DEBUG, logger="memjax_kernels.common.implementations"):
        assert choose("gla", None, ON_TPU) == "xla"
    assert "call the op in partition.over" in caplog.text
    assert choose("gla", "pallas_tpu", ON_TPU) == "pallas_tpu"


def test_a_kernel_is_picked_inside_a_shard_map(on_tpu, monkeypatch):
    chosen = []

    def body(x):
        chosen.append(choose("gla", None, ON_TPU))
        return x

    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("data",), auto, devices=jax.devices("cpu")[:1])
    spec = PartitionSpec("data")
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
    jax.eval_shape(mapped, jax.ShapeDtypeStruct((2,), "float32"))
    assert chosen == ["pallas_tpu"]


def test_an_unknown_platform_runs_what_a_cpu_runs(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "METAL")
    assert choose("gla", None, HERE) == "xla"


def test_an_explicit_choice_runs_or_raises():
    assert choose("gla", "reference", HERE) == "reference"
    with pytest.raises(
        ValueError,
        match="'pallas_tpu' of gla cannot run here: it needs a tpu",
    ):
        choose("gla", "pallas_tpu", HERE)
    with pytest.raises(
        ValueError,
        match="of gla must be None or one of .*'xla', 'reference'.*, got 'cuda'",
    ):
        choose("gla", "cuda", HERE)


def test_nothing_that_runs_is_an_error():
    with pytest.raises(ValueError, match="no implementation of gla runs here: .*odd"):
        choose("gla", None, {"xla": "odd"})


def test_needs_names_both_platforms():
    assert implementations.needs("cpu") == ""
    assert implementations.needs("gpu") == "it needs a gpu, jax runs on cpu"
