"""Kernels on a mesh: each device runs its rows and heads, and nothing else changes."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import memjax_kernels
from memjax_kernels.common import implementations, partition

ON_FOUR_DEVICES = """
import functools
import jax, jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType
import memjax_kernels
from memjax_kernels import partition
from memjax_kernels.trellis import call, pallas_tpu
from memjax_kernels.lattice import _KERNELS
from memjax_kernels.lattice import pallas_tpu as lattice

assert jax.device_count() == 4
mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(AxisType.Auto,) * 2)
interpret = pltpu.InterpretParams()
run = functools.partial(pallas_tpu.trellis_tpu, interpret=interpret)
call.CHUNKWISE["pallas_tpu"] = run, lambda *_: ""
_KERNELS["pallas_tpu"][0].obstacle = lambda *_: ""
form = functools.partial(lattice.lattice_tpu, interpret=interpret)
_KERNELS["pallas_tpu"] = lattice, form

keys = jax.random.split(jax.random.key(0), 5)
q, k, v, a = (jax.random.normal(key, (2, 9, 2, 8)) / 3 for key in keys[:4])
gamma = jax.nn.sigmoid(jax.random.normal(keys[4], (2, 9, 2)))
ops = {
    "trellis": lambda **o: memjax_kernels.trellis(
        q, k, v, a, gamma, -gamma, chunk_size=4, **o
    ),
    "lattice": lambda **o: memjax_kernels.lattice(q, k, v, gamma, chunk_size=4, **o),
}
for name, op in ops.items():
    wanted = op(implementation="xla")
    with partition.over(mesh, batch=("rows",), heads=("heads",)):
        got = jax.jit(functools.partial(op, implementation="pallas_tpu"))()
    pairs = zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True)
    assert all(jnp.allclose(x, y, atol=1e-5) for x, y in pairs), name
    shards = got[1].sharding.shard_shape(got[1].shape)
    assert shards == (1, 9, 1, 8), (name, shards)
"""


def test_each_device_runs_its_share():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", ON_FOUR_DEVICES],
        capture_output=True,
        text=True,
        env=os.environ | flags,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module", name="pod")
def _pod():
    pytest.importorskip("libtpu", reason="compiling for TPUs needs libtpu")
    topologies = pytest.importorskip("jax.experimental.topologies")
    topology = topologies.get_topology_desc(topology_name="v5e:2x2", platform="tpu")
    return jax.make_mesh(
        (2, 2), ("rows", "heads"), (AxisType.Auto,) * 2, devices=topology.devices
    )


def test_a_program_for_a_pod_takes_the_kernel_by_itself(pod, uncached):
    """Compiled from here for four chips, gradient and all."""
    place = NamedSharding(pod, P("rows", None, "heads"))
    like = lambda *more, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(
        (4, 128, 4, *more), dtype, sharding=place
    )
    tokens, gate = like(64), like(dtype=jnp.float32)

    def loss(q, k, v, gamma):
        with partition.over(pod, batch=("rows",), heads=("heads",)):
            return memjax_kernels.lattice(q, k, v, gamma, chunk_size=64)[1].sum()

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
    compiled = gradient.lower(tokens, tokens, tokens, gate).compile()
    text = str(compiled.as_text())
    assert "lattice" in text and "tpu_custom_call" in text
    assert compiled.output_shardings[0].shard_shape((4, 128, 4, 64)) == (2, 128, 2, 64)


def test_outside_nothing_changes():
    form = lambda tokens, memory: (memory, tokens)
    assert partition.chunkwise(form) is form
    assert partition.platform() == jax.default_backend()


def test_the_mesh_says_where_ops_are_traced_for(pod):
    obstacles = {"reference": "", "xla": "", "pallas_tpu": ""}
    assert implementations.choose("op", None, obstacles) == "xla"
    with partition.over(pod):
        assert partition.platform() == "tpu" and partition.is_whole()
        assert implementations.choose("op", None, obstacles) == "pallas_tpu"
        assert not implementations.needs("tpu")
    assert implementations.needs("tpu")


def test_axes_that_do_not_divide_are_left_out():
    fit = functools.partial(partition._fit, AbstractMesh((2,), ("rows",)))
    assert fit(("rows",), 4) == ("rows",)
    assert fit(("rows",), 3) is None and fit((), 4) is None
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match=r"axes of the mesh.*\['columns'\]"):
        with partition.over(mesh, heads=("columns",)):
            pass
