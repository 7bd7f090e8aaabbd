"""The GPU kernels of Lattice: interpreted, exported, and compiled for a Hopper GPU."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax_kernels import LATTICE_VARIANTS, lattice, lattice_init_state, lattice_state
from memjax_kernels._src.lattice import Rule, chunked
from memjax_kernels._src.lattice.pallas_gpu import lattice_gpu, unsupported
from memjax_kernels._src.lattice.reference import lattice_reference
from memjax_kernels._src.lattice.xla import lattice_xla
from tests.kernels.lattice.against_xla import open_state

SLOTS = WIDTH = 64


def draw(batch, time, heads, dtype, seed=0) -> Any:
    """Tokens: q, k, v, gamma."""
    keys = jax.random.split(jax.random.key(seed), 4)

    def normal(i, *width):
        return jax.random.normal(keys[i], (batch, time, heads, *width))

    def unit(x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    low = unit(normal(0, SLOTS)), unit(normal(1, SLOTS)), unit(normal(2, WIDTH))
    return *(x.astype(dtype) for x in low), jax.nn.sigmoid(normal(3))


def in_chunks(form, rule, reset, tokens, state, empty):
    """The state after the tokens but for its position, and their reads."""
    given: Any = (*tokens, None, state, reset, empty, rule)
    state, y = chunked.in_chunks(form, *given)
    return state.start, state.tokens and state.tokens[:3], y


def by_token(rule, reset, tokens: Any, state, empty):
    """`in_chunks`, a token at a time."""
    empty = lattice_state(empty.start, empty.chunk_size)
    if state is not None:
        # Zeros behind the open tokens are no arguments.
        behind = jax.tree.map(lambda x: x * (x != 0), state.tokens)
        state = dataclasses.replace(state, tokens=behind)
    given: Any = (*tokens, None, state, reset, empty, rule)
    state, y = lattice_reference(*given)
    return state.start, state.tokens and state.tokens[:3], y


def both(function, rule, reset, arguments):
    """Results, and gradients of everything for random cotangents."""

    @jax.jit
    def pull(arguments):
        values, back = jax.vjp(functools.partial(function, rule, reset), *arguments)
        leaves, tree = jax.tree.flatten(values)
        keys = jax.random.split(jax.random.key(7), len(leaves))
        weights = jax.tree.unflatten(
            tree,
            [
                jax.random.normal(key, x.shape).astype(x.dtype)
                for x, key in zip(leaves, keys, strict=True)
            ],
        )
        # Positions have no gradient.
        return values, jax.tree.map(
            lambda x: None if x.dtype == jax.dtypes.float0 else x, back(weights)
        )

    return pull(arguments)


@pytest.fixture
def interpreted(gpu):
    return functools.partial(
        in_chunks, functools.partial(lattice_gpu, interpret=gpu.interpreter())
    )


@pytest.mark.slow
@pytest.mark.parametrize("size, time", [(8, 24), (1, 5)])
def test_gradients_of_gradients_agree_with_xla(gpu, interpreted, size, time):
    tokens = draw(1, time, 1, jnp.float32)
    empty = lattice_init_state(1, 1, SLOTS, WIDTH, size)
    reset = jnp.zeros((1, time), bool).at[0, time - time % 8 - size].set(True)

    def second_order(function):
        def loss(*tokens):
            return jnp.sum(function(Rule("dec"), reset, tokens, None, empty)[-1] ** 2)

        def penalty(*tokens):
            gradients = jax.grad(loss, range(len(tokens)))(*tokens)
            return sum(jnp.sum(d**2) for d in gradients)

        return jax.jit(jax.grad(penalty, range(len(tokens))))(*tokens)

    expected = second_order(functools.partial(in_chunks, lattice_xla))
    gpu.close(second_order(interpreted), expected, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("variant", LATTICE_VARIANTS)
def test_open_chunks_and_resets_agree_with_the_token_loop(gpu, interpreted, variant):
    b, t, h, c = 2, 36, 1, 16
    tokens = draw(b, t, h, jnp.float32)
    keys = jax.random.split(jax.random.key(3), 3)

    def normal(i):
        return jax.random.normal(keys[i], (b, h, SLOTS, WIDTH))

    def unit(x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    state = open_state(unit(normal(0)), jnp.array([10, 0], jnp.int32), c)
    empty = lattice_state(unit(normal(2)), c)
    reset = jnp.zeros((b, t), bool).at[0, 22].set(True).at[1, 16].set(True)
    arguments = (tokens, state, empty)
    rule = Rule(variant)
    expected = both(by_token, rule, reset, arguments)
    gpu.close(both(interpreted, rule, reset, arguments), expected, 2e-5)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected))


@pytest.mark.slow
def test_half_precision_agrees_with_xla(gpu, interpreted):
    b, t, h, c = 1, 128, 1, 64
    low = draw(b, t, h, jnp.bfloat16)
    *high, gamma = low
    high = (*(x.astype(jnp.float32) for x in high), 0.1 * gamma)
    empty = lattice_init_state(b, h, SLOTS, WIDTH, c)
    rule = Rule("dec")
    xla = functools.partial(in_chunks, lattice_xla)
    expected = both(xla, rule, None, (high, None, empty))
    actual = both(interpreted, rule, None, ((*low[:3], 0.1 * gamma), None, empty))
    gpu.close(actual, expected, 2e-2)
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
def test_exports_for_cuda(gpu):
    module = gpu.exported(functools.partial(gradient, "dec"), *arguments(16))
    assert module.count("mosaic_gpu_v2(") == 2 or module.count("mosaic_gpu(") == 2


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
    assert "M and V must be 64" in why(width=32)
    assert "normalize=True" in why(normalize=False)
    assert "forget=None" in why(forget="l2")
    assert why(chunk_size=1) == ""
    assert "1 or a multiple of 8 up to 64" in why(chunk_size=12)


def test_explicit_choice_without_gpu_raises():
    with pytest.raises(ValueError, match="pallas_gpu.*needs a gpu"):
        lattice(*draw(1, 2, 1, jnp.bfloat16), implementation="pallas_gpu")
