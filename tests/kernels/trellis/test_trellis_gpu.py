"""The GPU kernels of Trellis: interpreted, exported, and compiled for a Hopper GPU."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax_kernels import trellis, trellis_init_state, trellis_state
from memjax_kernels._src.common import gradients, mosaic
from memjax_kernels._src.trellis import segment
from memjax_kernels._src.trellis.pallas_gpu import entry, trellis_gpu
from memjax_kernels._src.trellis.state import Rule
from memjax_kernels._src.trellis.xla import trellis_xla
from tests.kernels.distances import close
from tests.kernels.trellis.against_xla import opened

WIDTH = 64


def draw(batch, time, heads, dtype, *, seed=0) -> Any:
    """Tokens: q, k, v, alpha, gamma, g."""
    draws = np.random.default_rng(seed)

    def normal(*width):
        return draws.standard_normal((batch, time, heads, *width), np.float32)

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    low = unit(normal(WIDTH)), unit(normal(WIDTH)), unit(normal(WIDTH))
    low = (jnp.asarray(x, dtype) for x in (*low, 0.3 * normal(WIDTH)))
    gamma, g = (1 / (1 + np.exp(-normal(2) - shift)) for shift in (0, 1))
    return *low, jnp.asarray(gamma), jnp.asarray(np.log(g))


def draw_state(seed, batch, heads, size):
    """A state at a chunk's start."""
    shape = (2, batch, heads, WIDTH, WIDTH)
    keys, values = 0.3 * np.random.default_rng(seed).standard_normal(shape, np.float32)
    return trellis_state(jnp.asarray(keys), jnp.asarray(values), size)


def memories_and_reads(implementation, phi, reset, tokens: Any, state, empty):
    """After the tokens, and of each."""
    empty = trellis_state(empty.keys, empty.values, empty.chunk_size)
    if state is not None and state.tokens is not None:
        # Zeros behind the open tokens are no arguments.
        behind = jax.tree.map(lambda x: x * (x != 0), state.tokens)
        state = dataclasses.replace(state, tokens=behind)
    given: Any = (*tokens, state, reset, empty)
    form = functools.partial(implementation, rule=Rule(phi))
    after, y = segment.in_chunks(form, *given)
    return (after.keys, after.values, after.tokens), y


@pytest.fixture
def interpreted(gpu):
    return functools.partial(trellis_gpu, interpret=gpu.interpreter())


@functools.partial(jax.jit, static_argnums=(0, 1))
def both(implementation, phi, reset, arguments):
    """Results, and gradients of everything for random cotangents."""
    forward = functools.partial(memories_and_reads, implementation, phi, reset)
    values, back = jax.vjp(forward, *arguments)
    draws = np.random.default_rng(7)
    gradients = back(
        jax.tree.map(lambda x: draws.standard_normal(x.shape).astype(x.dtype), values)
    )
    # Positions have none.
    return values, jax.tree.map(
        lambda x: None if x.dtype == jax.dtypes.float0 else x, gradients
    )


@pytest.mark.slow
def test_open_chunks_and_resets_agree_with_xla(interpreted):
    """`test_trellis.py` compares the XLA form with the token loop."""
    b, t, h, c = 2, 18, 1, 16
    tokens = draw(b, t, h, jnp.float32)
    state, empty = (draw_state(seed, b, h, c) for seed in (3, 4))
    state = opened(state, draw(b, c, h, jnp.float32, seed=5), [13, 0])
    reset = np.arange(t) == np.array([3, 16])[:, None]
    arguments = (tokens, state, empty)
    expected = both(trellis_xla, "l2_silu", reset, arguments)
    close(both(interpreted, "l2_silu", reset, arguments), expected, 5e-6)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected))


@pytest.mark.slow
def test_half_precision_agrees_with_xla(interpreted):
    b, t, h, c = 1, 128, 1, 64
    phi = "softmax"
    low = draw(b, t, h, jnp.bfloat16)
    empty = trellis_init_state(b, h, WIDTH, WIDTH, WIDTH, c)
    high = jax.tree.map(lambda x: x.astype(jnp.float32), low)
    expected = both(trellis_xla, phi, None, (high, None, empty))
    actual = both(interpreted, phi, None, (low, None, empty))
    close(actual, expected, 1e-2)
    assert actual[0][1].dtype == jnp.bfloat16


@pytest.mark.slow
def test_gradients_of_gradients_differentiate_the_same_function(monkeypatch):
    """The XLA form of the kernels' own arguments is the op: `gradients.of_kernels`."""
    b, t, h, c = 2, 20, 1, 8
    state, empty = (draw_state(seed, b, h, c) for seed in (3, 4))
    reset = np.arange(t) == np.array([16, t])[:, None]
    given = draw(b, t, h, jnp.float32), state, empty
    monkeypatch.setattr(gradients, "of_kernels", lambda *parts: parts[-1])
    plain = entry.kernels_of(*entry.PARTS)

    def run(form):
        return jax.jit(memories_and_reads, static_argnums=(0, 1))(
            form, "l2_silu", reset, *given
        )

    close(run(plain), run(trellis_xla), 1e-6)


def loss(phi, tokens, state, empty, reset):
    values = memories_and_reads(trellis_gpu, phi, reset, tokens, state, empty)
    leaves = jax.tree.leaves(values)
    return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in leaves)


def gradient(phi, tokens, state, empty, reset):
    """Of everything, all kernels included."""
    function = functools.partial(loss, phi)
    return jax.grad(function, (0, 1, 2), allow_int=True)(tokens, state, empty, reset)


def arguments(chunk_size):
    b, t, h = 2, 2 * chunk_size + 3, 2
    tokens = draw(b, t, h, jnp.bfloat16)
    empty = trellis_init_state(b, h, WIDTH, WIDTH, WIDTH, chunk_size)
    return tokens, empty, empty, jnp.zeros((b, t), bool)


@pytest.mark.slow
def test_exports_for_cuda(gpu):
    module = gpu.exported(functools.partial(gradient, "l2_silu"), *arguments(16))
    assert module.count("mosaic_gpu_v2(") == 2 or module.count("mosaic_gpu(") == 2


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size, phi", [(64, "ln_silu"), (16, "softmax")])
def test_the_gradient_compiles(gpu, uncached, chunk_size, phi):
    function = functools.partial(gradient, phi)
    text = gpu.compiled(function, *arguments(chunk_size))
    assert "memjax_trellis_backward" in text


def test_unsupported_reasons():
    def why(dtype=jnp.bfloat16, width=64, slots=64, chunk_size=64):
        q = jnp.zeros((1, 2, 1, width), dtype)
        alpha = jnp.zeros((1, 2, 1, slots), jnp.bfloat16)
        return mosaic.unsupported(chunk_size, q=q, k=q, v=q, alpha=alpha)

    assert why() == why(chunk_size=16) == ""
    assert "q must be bfloat16" in why(dtype=jnp.float32)
    assert "q must have 64 channels, got 32" in why(width=32)
    assert "alpha must have 64 channels, got 40" in why(slots=40)
    assert "multiple of 8 up to 64" in why(chunk_size=1)
    assert "multiple of 8 up to 64" in why(chunk_size=128)


def test_explicit_choice_without_gpu_raises():
    tokens = draw(1, 2, 1, jnp.bfloat16)
    with pytest.raises(ValueError, match="pallas_gpu.*needs a gpu"):
        trellis(*tokens, implementation="pallas_gpu")
