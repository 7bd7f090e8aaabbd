"""Kernels on a mesh: each device runs its batch elements and heads."""

import functools
import math
import re

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import memjax_kernels
from memjax_kernels._src.common import cpu, implementations, partition
from memjax_kernels._src.lattice import _CHUNKWISE as lattice_forms
from memjax_kernels._src.lattice.pallas_tpu import lattice_tpu
from memjax_kernels._src.trellis import _CHUNKWISE as trellis_forms
from memjax_kernels._src.trellis.pallas_tpu import trellis_tpu
from tests.training.processes import Process


def on_four_devices():
    """Interpreted kernels, divided by rows and heads, equal the forms of XLA."""
    assert jax.device_count() == 4
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    implementations.needs = lambda platform: ""
    for forms, kernel in (trellis_forms, trellis_tpu), (lattice_forms, lattice_tpu):
        form = functools.partial(kernel, interpret=pltpu.InterpretParams())
        forms["pallas_tpu"] = partition.chunkwise(form)

    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, a = (jax.random.normal(key, (2, 20, 4, 64)) / 3 for key in keys[:4])
    gamma = jax.nn.sigmoid(jax.random.normal(keys[4], (2, 20, 4)))
    ops = {
        "trellis": lambda **o: memjax_kernels.trellis(
            q, k, v, a, gamma, -gamma, chunk_size=16, **o
        ),
        "lattice": lambda **o: memjax_kernels.lattice(
            q, k, v, gamma, chunk_size=16, **o
        ),
    }
    for name, op in ops.items():
        wanted = jax.jit(functools.partial(op, implementation="xla"))()
        with jax.set_mesh(mesh):
            got = jax.jit(functools.partial(op, implementation="pallas_tpu"))()
        pairs = zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True)
        assert all(np.allclose(x, y, atol=1e-5) for x, y in pairs), name
        shards = got[1].sharding.shard_shape(got[1].shape)
        assert shards == (1, 20, 2, 64), (name, shards)


@pytest.mark.slow
def test_each_device_computes_its_share(with_devices):
    Process(on_four_devices, environment=with_devices(4)).require_end()


@pytest.fixture(scope="module", name="pod")
def _pod():
    pytest.importorskip("libtpu", reason="compiling for TPUs needs libtpu")
    topologies = pytest.importorskip("jax.experimental.topologies")
    topology = topologies.get_topology_desc(topology_name="v5e:2x2", platform="tpu")
    return jax.make_mesh(
        (2, 2), ("data", "tensor"), (AxisType.Auto,) * 2, devices=topology.devices
    )


def lattice_loss(q, k, v, gamma):
    return memjax_kernels.lattice(q, k, v, gamma, chunk_size=64)[1].sum()


def shapes(sharding=None):
    def like(*more, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((4, 128, 4, *more), dtype, sharding=sharding)

    return like(64), like(64), like(64), like(dtype=jnp.float32)


def trellis_loss(q, k, v, gamma):
    return memjax_kernels.trellis(q, k, v, v, gamma, chunk_size=64)[1].sum()


@pytest.mark.slow
def test_program_for_a_pod_contains_kernels(pod, uncached):
    """Compiled from here for four chips, gradient and all."""
    gradient = jax.jit(jax.grad(trellis_loss, argnums=(0, 1, 2, 3)))
    place = NamedSharding(pod, P("data", None, "tensor"))
    with jax.set_mesh(pod):
        compiled = gradient.lower(*shapes(place)).compile()
    text = str(compiled.as_text())
    kernels = re.findall(r"custom-call\(.*trellis_(forward|backward)", text)
    assert sorted(kernels) == ["backward", "forward"]
    assert compiled.output_shardings[0].shard_shape((4, 128, 4, 64)) == (2, 128, 2, 64)


def kernel_shapes(function, *arguments):
    """The shapes of the results of each kernel in a program."""
    found = []

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                found.append([x.aval.shape for x in equation.outvars])
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                visit(inner)

    visit(jax.make_jaxpr(function)(*arguments).jaxpr)
    return found


def test_the_mesh_of_the_arguments_divides_the_kernels(pod):
    """Of four batch elements of four heads each of 2 x 2 devices has a quarter."""
    whole = kernel_shapes(lattice_loss, *shapes())
    place = NamedSharding(pod, P("data", None, "tensor"))
    divided = kernel_shapes(lattice_loss, *shapes(place))
    assert _sizes(divided) == [size // 4 for size in _sizes(whole)]


def test_a_kernel_in_a_shard_map_is_not_divided_again(pod):
    spec = P("data", None, "tensor")
    mapped = jax.shard_map(
        lambda *x: memjax_kernels.lattice(*x, chunk_size=64)[1],
        mesh=pod,
        in_specs=spec,
        out_specs=spec,
    )
    whole = kernel_shapes(lattice_loss, *shapes())
    mine = kernel_shapes(mapped, *shapes())
    assert _sizes(mine) == [size // 4 for size in _sizes(whole)]


def _sizes(kernels):
    """Numbers in the results of the one kernel."""
    (outputs,) = kernels
    return [math.prod(shape) for shape in outputs]


def test_rows_are_one_axis_but_where_a_mesh_divides_them():
    def are_joined(place):
        x = jax.ShapeDtypeStruct((4, 6, 8), jnp.float32, sharding=place)
        return "f32[24,8]" in str(jax.make_jaxpr(cpu.weigh)(x, jnp.ones((8, 2))))

    def on(devices):
        mesh = AbstractMesh((devices,), ("data",), (AxisType.Auto,))
        return NamedSharding(mesh, P("data"))

    # Whatever this process has: a program may be for other devices.
    assert are_joined(None) and are_joined(on(1)) and not are_joined(on(4))


def test_axes_that_do_not_divide_are_left_out():
    mesh = AbstractMesh((2, 2), ("data", "fsdp"))
    assert partition._fit(mesh, ["data", "fsdp"], 8) == ("data", "fsdp")
    assert partition._fit(mesh, ["data"], 3) is None
    assert partition._fit(mesh, [], 4) is None
