"""The GPU kernels of Lattice: interpreted, and compiled for a Hopper GPU.

`common/test_implementations.py` exports them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax_kernels import lattice, lattice_init_state, lattice_state
from memjax_kernels._src.common import gradients
from memjax_kernels._src.lattice import Rule, segment
from memjax_kernels._src.lattice.pallas_gpu import (
    entry,
    lattice_gpu,
    unsupported,
)
from memjax_kernels._src.lattice.xla import lattice_xla
from tests.kernels.distances import close
from tests.kernels.lattice.against_xla import open_state, rows

SLOTS = WIDTH = 64


def draw(batch, time, heads, dtype, seed=0) -> Any:
    """Tokens: q, k, v, gamma."""
    draws = np.random.default_rng(seed)

    def normal(*width):
        return draws.standard_normal((batch, time, heads, *width), np.float32)

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    low = unit(normal(SLOTS)), unit(normal(SLOTS)), unit(normal(WIDTH))
    gamma = jnp.asarray(1 / (1 + np.exp(-normal())))
    return *(jnp.asarray(x, dtype) for x in low), gamma


def in_chunks(form, rule, reset, tokens, state, empty):
    """The state after the tokens but for its position, and their reads."""
    given: Any = (*tokens, None, state, reset, empty)
    state, y = segment.in_chunks(functools.partial(form, rule=rule), *given)
    return state.start, state.tokens and state.tokens[:3], y


IN_XLA = functools.partial(in_chunks, lattice_xla)


@functools.partial(jax.jit, static_argnums=(0, 1))
def both(function, rule, reset, arguments):
    """Results, and gradients of everything for random cotangents."""
    values, back = jax.vjp(functools.partial(function, rule, reset), *arguments)
    draws = np.random.default_rng(7)
    gradients = back(
        jax.tree.map(lambda x: draws.standard_normal(x.shape).astype(x.dtype), values)
    )
    # Positions have no gradient.
    return values, jax.tree.map(
        lambda x: None if x.dtype == jax.dtypes.float0 else x, gradients
    )


@pytest.fixture
def interpreted(gpu):
    return functools.partial(
        in_chunks, functools.partial(lattice_gpu, interpret=gpu.interpreter())
    )


@pytest.mark.slow
def test_gradients_of_gradients_differentiate_the_same_function(monkeypatch):
    """The XLA form of the kernels' own arguments is the op: `gradients.of_kernels`."""
    b, t, h, size = 2, 20, 1, 8
    state, empty = (lattice_state(rows(i, b, h, SLOTS, WIDTH), size) for i in (3, 4))
    reset = np.arange(t) == np.array([16, t])[:, None]
    given = draw(b, t, h, jnp.float32), state, empty
    monkeypatch.setattr(gradients, "of_kernels", lambda *parts: parts[-1])
    plain = entry.kernels_of(*entry.PARTS)

    def run(form):
        form = functools.partial(in_chunks, form, Rule("dec"))
        return jax.jit(form)(reset, *given)

    close(run(plain), run(lattice_xla), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["dec", "enc"])
def test_open_chunks_and_resets_agree_with_xla(interpreted, variant):
    """`test_lattice.py` compares the XLA form with the token loop."""
    b, t, h, c = 2, 18, 1, 16
    tokens = draw(b, t, h, jnp.float32)
    start, fresh = (rows(seed, b, h, SLOTS, WIDTH) for seed in (3, 4))
    state, empty = open_state(start, [10, 0], c), lattice_state(fresh, c)
    reset = np.arange(t) == np.array([6, 16])[:, None]
    arguments = (tokens, state, empty)
    rule = Rule(variant)
    expected = both(IN_XLA, rule, reset, arguments)
    close(both(interpreted, rule, reset, arguments), expected, 2e-5)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected))


@pytest.mark.slow
def test_half_precision_agrees_with_xla(interpreted):
    b, t, h, c = 1, 128, 1, 64
    low = draw(b, t, h, jnp.bfloat16)
    *high, gamma = low
    high = (*(x.astype(jnp.float32) for x in high), 0.1 * gamma)
    empty = lattice_init_state(b, h, SLOTS, WIDTH, c)
    rule = Rule("sim")
    expected = both(IN_XLA, rule, None, (high, None, empty))
    actual = both(interpreted, rule, None, ((*low[:3], 0.1 * gamma), None, empty))
    close(actual, expected, 2e-2)
    assert actual[0][2].dtype == jnp.bfloat16


def gradient(variant, tokens, empty, reset):
    """Of everything, both kernels included."""

    def loss(tokens, empty):
        values = in_chunks(lattice_gpu, Rule(variant), reset, tokens, None, empty)
        leaves = jax.tree.leaves(values)
        return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in leaves)

    return jax.grad(loss, (0, 1), allow_int=True)(tokens, empty)


def arguments(chunk_size):
    b, t, h = 2, 2 * chunk_size + 3, 2
    tokens = draw(b, t, h, jnp.bfloat16)
    return (
        tokens,
        lattice_init_state(b, h, SLOTS, WIDTH, chunk_size),
        jnp.zeros((b, t), bool),
    )


@pytest.mark.slow
@pytest.mark.parametrize("variant, chunk_size", [("dec", 64), ("enc", 16), ("sim", 8)])
def test_the_gradient_compiles(gpu, uncached, variant, chunk_size):
    text = gpu.compiled(functools.partial(gradient, variant), *arguments(chunk_size))
    assert "memjax_lattice_backward" in text


def test_unsupported_reasons():
    def why(dtype=jnp.bfloat16, width=64, chunk_size=16, **options):
        q, k, v, _ = draw(1, 2, 1, dtype)
        return unsupported(q, k, v[..., :width], chunk_size, Rule(**options))

    assert why() == why(chunk_size=64) == ""
    assert "q must be bfloat16" in why(dtype=jnp.float32)
    assert "v must have 64 channels, got 32" in why(width=32)
    assert "normalize must be True" in why(normalize=False)
    assert "forget must be None" in why(forget="l2")
    for size in (1, 12):
        assert "a multiple of 8 up to 64" in why(chunk_size=size)


def test_explicit_choice_without_gpu_raises():
    with pytest.raises(ValueError, match="pallas_gpu.*needs a gpu"):
        lattice(*draw(1, 2, 1, jnp.bfloat16), implementation="pallas_gpu")
