"""The TPU kernels of Trellis: interpreted, and compiled without a TPU."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from memjax_kernels import trellis_init_state
from memjax_kernels._src.trellis import pallas_tpu
from memjax_kernels._src.trellis.pallas_tpu import SAVED, trellis_tpu, unsupported
from memjax_kernels._src.trellis.xla import trellis_xla
from tests.kernels.distances import close
from tests.kernels.on_tpu import needs_libtpu
from tests.kernels.trellis.against_xla import (
    PLAINLY_INTERPRETED,
    draw,
    in_chunks,
    perturbed,
)


@pytest.mark.slow
def test_gradients_of_gradients_differentiate_the_same_function(monkeypatch):
    """The XLA form of the kernels' own arguments is the op: `gradients.of_kernels`."""
    b, t, h, d, c = 2, 20, 2, 64, 16
    tokens = draw(b, t, h, d, d, d)
    state = perturbed(trellis_init_state(b, h, d, d, d, c), 1)
    empty = perturbed(trellis_init_state(b, h, d, d, d, c), 2)
    reset = np.arange(t) == np.array([16, t])[:, None]

    def run(form):
        return jax.jit(in_chunks, static_argnums=0)(form, tokens, state, empty, reset)

    # It runs where heads fill no registers.
    monkeypatch.setattr(pallas_tpu, "heads_of_pack", lambda *_: 0)
    close(run(trellis_tpu), run(trellis_xla), 1e-6)


def one_row(implementation, sizes):
    """Reads of one row of tokens [T, H, ...]."""
    h, d, m, c = sizes

    def reads(*tokens):
        rows = [x[None] for x in tokens]
        return in_chunks(
            implementation, rows, None, trellis_init_state(1, h, m, d, d, c)
        )[1]

    return reads


@pytest.mark.slow
def test_vmap_agrees_with_xla():
    sizes = h, d, m, _ = 2, 64, 64, 16
    tokens = draw(2, 18, h, d, d, m)
    # The TPU interpreter of jax 0.10.2 does not take what vmap makes of a kernel.
    actual = jax.jit(jax.vmap(one_row(PLAINLY_INTERPRETED, sizes)))(*tokens)
    expected = jax.jit(jax.vmap(one_row(trellis_xla, sizes)))(*tokens)
    close(actual, expected, 2e-6)


def for_one_device(function, tokens):
    """The program that a single v5e runs."""
    device = topologies.get_topology_desc("v5e:2x2", "tpu").devices[0]
    sharding = SingleDeviceSharding(device)
    place = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    arguments = (place(x.shape, x.dtype) for x in tokens)
    return jax.jit(function).lower(*arguments).compile().as_text() or ""


@needs_libtpu
def test_vmap_compiles():
    sizes = h, d, m, _ = 2, 64, 64, 16
    tokens = draw(3, 16, h, d, d, m, jnp.bfloat16)
    assert "trellis_forward" in for_one_device(
        jax.vmap(one_row(trellis_tpu, sizes)), tokens
    )


@needs_libtpu
def test_remat_policy_saves_residuals():
    tokens = draw(1, 16, 2, 64, 64, 64)
    policy = jax.checkpoint_policies.save_only_these_names(*SAVED)

    @functools.partial(jax.checkpoint, policy=policy)
    def loss(*tokens):
        empty = trellis_init_state(1, 2, 64, 64, 64, 16)
        return jnp.sum(in_chunks(trellis_tpu, tokens, None, empty)[1] ** 2)

    text = for_one_device(jax.value_and_grad(loss, range(6)), tokens)
    # Without them it runs again for the gradient.
    assert len(re.findall(r"custom-call\(.*trellis_forward", text)) == 1
    assert len(re.findall(r"custom-call\(.*trellis_backward", text)) == 1


def test_unsupported_reasons():
    def why(dtype, alpha_dtype, width, heads=2, size=64):
        q = jnp.zeros((1, 2, heads, width), dtype)
        v, alpha = q.astype("float32"), q.astype(alpha_dtype)
        return unsupported(q, q, v, alpha, size)

    f32 = "float32"
    assert why("float32", "bfloat16", 64) == why(f32, f32, 64, size=16) == ""
    assert "all be float32 or all bfloat16" in why("bfloat16", "float32", 64)
    assert "alpha must be float32 or bfloat16" in why("float32", "float16", 64)
    assert "must be a multiple of 16, got 24" in why(f32, f32, 64, size=24)
    assert "must be a multiple of 16, got 4" in why(f32, f32, 64, size=4)
    assert "no number of 3 heads, from 2 on, of 64 slots and 64" in why(
        f32, f32, 64, heads=3
    )
    assert "and fits in VMEM" in why(f32, f32, 512)


def compiled(name, mesh_shape, specs, sizes, dtype, check_vma=None):
    """The gradient of everything, compiled for `name`; under shard_map if asked."""
    devices = np.array(topologies.get_topology_desc(name, "tpu").devices)
    devices = devices[: np.prod(mesh_shape)].reshape(mesh_shape)
    mesh = Mesh(devices, ("data", "model"))
    b, t, h, k, v, m, c = sizes
    row, token, memory = specs
    tokens: Any = jax.eval_shape(lambda: draw(b, t, h, k, v, m, dtype, gates=()))
    state = jax.eval_shape(lambda: trellis_init_state(b, h, m, k, v, c))
    state_specs = jax.tree.map(lambda x: memory if x.ndim > 1 else row, state)
    reset = jax.ShapeDtypeStruct((b, t), bool)

    def forward(tokens, state, reset):
        rows, _, heads, _ = tokens[0].shape
        empty = trellis_init_state(rows, heads, m, k, v, c)
        after, y = in_chunks(trellis_tpu, tokens, state, empty, reset)
        return (after.keys, after.values), y

    if check_vma is not None:
        token_specs = jax.tree.map(lambda _: token, tokens)
        out = memory, memory
        forward = jax.shard_map(
            forward,
            mesh=mesh,
            in_specs=(token_specs, state_specs, row),
            out_specs=(out, token),
            check_vma=check_vma,
        )

    def loss(tokens, state, reset):
        leaves = jax.tree.leaves(forward(tokens, state, reset))
        return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in leaves)

    def place(spec, x):
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
        )

    arguments = (
        jax.tree.map(functools.partial(place, token), tokens),
        jax.tree.map(place, state_specs, state),
        place(row, reset),
    )
    gradient = jax.grad(loss, (0, 1), allow_int=True)
    return jax.jit(gradient).lower(*arguments).compile().as_text() or ""


@needs_libtpu
@pytest.mark.parametrize(
    "name, sizes, dtype",
    [
        # Heads in pairs.
        ("v5p:2x2x1", (1, 64, 4, 128, 128, 128, 64), jnp.bfloat16),
        # Seven packs fill what a program may take.
        ("v5e:2x2", (14, 16, 2, 128, 128, 128, 16), jnp.bfloat16),
    ],
)
def test_the_gradient_compiles(name, sizes, dtype):
    text = compiled(name, (1, 1), (P(), P(), P()), sizes, dtype)
    assert "trellis_forward" in text and "trellis_backward" in text


@needs_libtpu
@pytest.mark.parametrize(
    "name, check_vma, size",
    [("v6e:2x2", True, 16), ("v5e:2x2", False, 64)],
)
def test_the_gradient_compiles_over_a_mesh(name, check_vma, size):
    """Rows and heads are apart: nothing is exchanged."""
    specs = P("data"), P("data", None, "model"), P("data", "model")
    sizes = (2, size, 4, 64, 64, 64, size)
    text = compiled(name, (2, 2), specs, sizes, jnp.float32, check_vma=check_vma)
    assert "trellis_backward" in text
    # The sum of the loss over devices is the one thing that is.
    assert "all-gather" not in text and "all-to-all" not in text
