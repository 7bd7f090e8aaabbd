"""Which code runs an op where nothing is asked for."""

import jax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from memjax_kernels import implementations

RUNS = {"reference": "", "xla": "", "pallas_tpu": ""}


@pytest.fixture
def chips(monkeypatch):
    """jax believes that it has as many TPU chips as it is told."""

    def have(number):
        monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
        monkeypatch.setattr(jax, "device_count", lambda: number)

    return have


def test_a_kernel_runs_where_xla_need_not_partition_it(chips):
    choose = lambda: implementations.choose("op", None, RUNS)
    chips(1)
    assert choose() == "pallas_tpu"
    chips(4)
    assert choose() == "xla"
    # Asked for, it runs: the arrays may all lie on one chip.
    assert implementations.choose("op", "pallas_tpu", RUNS) == "pallas_tpu"
    chosen = []

    def body(x):
        chosen.append(choose())
        return x

    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    jax.eval_shape(sharded, jax.ShapeDtypeStruct((2,), "float32"))
    assert chosen == ["pallas_tpu"]


def test_what_cannot_run_is_passed_over_or_refused():
    # Here jax runs on a CPU.
    obstacles = RUNS | {"xla": "it is Sunday", "pallas_tpu": "it needs a tpu"}
    assert implementations.choose("op", None, obstacles) == "reference"
    with pytest.raises(ValueError, match="of op cannot run here: it is Sunday"):
        implementations.choose("op", "xla", obstacles)
    with pytest.raises(ValueError, match="no implementation of op runs here"):
        implementations.choose("op", None, {"pallas_tpu": "it needs a tpu"})
