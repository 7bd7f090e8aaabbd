"""Steps bounded by what the keys of a chunk have in common, of unit values."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax_kernels import l2_normalize, trellis, trellis_init_state, trellis_step
from memjax_kernels._src.trellis.functions import bounded
from tests.kernels.distances import close
from tests.kernels.trellis.against_xla import draw

B, T, H, K, C = 2, 11, 2, 3, 4


def unit(x) -> Any:
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def test_steps_of_a_chunk_are_the_formula():
    random = np.random.default_rng(0)
    k: Any = np.asarray(unit(random.standard_normal((B, H, C, K), np.float32)))
    gamma: Any = random.random((B, H, C), np.float32)
    expected = gamma.copy()
    for t in range(C):
        for s in range(t):
            alike = (k[..., s, :] * k[..., t, :]).sum(axis=-1) ** 2
            expected[..., t] *= 1 - gamma[..., s] * alike
    found = jax.jit(bounded)(k, gamma)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_repeated_key_is_corrected_once_orthogonal_key_fully():
    gamma: Any = np.random.default_rng(0).random((H, C), np.float32)
    same: Any = np.full((H, C, K), K**-0.5, "f4")
    whole = 1 - np.prod(1 - gamma, axis=1)
    found = jax.jit(bounded)(same, gamma).sum(axis=1)
    np.testing.assert_allclose(found, whole, rtol=1e-5)
    apart: Any = np.broadcast_to(np.eye(C, dtype="f4"), (H, C, C))
    np.testing.assert_allclose(jax.jit(bounded)(apart, gamma), gamma, rtol=1e-6)


def test_a_step_of_one_leaves_nothing_and_finite_gradients():
    k, gamma = jnp.ones((3, 1)), jnp.array([0.5, 1.0, 0.5])
    np.testing.assert_allclose(bounded(k, gamma), [0.5, 0.5, 0.0], atol=1e-6)
    # Of the third: the product over the others is 1/2, of which 1/2 is taken.
    slopes = jax.grad(lambda gamma: bounded(k, gamma)[2])(gamma)
    np.testing.assert_allclose(slopes, [0.0, -0.25, 0.0], atol=1e-6)


@functools.cache
def run(implementation) -> Any:
    options = {"chunk_size": C, "bound_steps": True, "normalize": True}
    return jax.jit(functools.partial(trellis, **options, implementation=implementation))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_segments_continue_a_chunk(implementation):
    """With the steps of the open chunk as the first call had them."""
    tokens: Any = draw(B, T, H, K, K, K)
    state = trellis_init_state(B, H, K, K, K, C)
    whole = run("xla")(*tokens, state)
    first, y = run(implementation)(*(x[:, :6] for x in tokens), state)
    after, z = run(implementation)(*(x[:, 6:] for x in tokens), first)
    close((after, jnp.concatenate([y, z], axis=1)), whole, 1e-5)
    # Equal to values and targets that were normalised, and steps bounded, before.
    q, k, v, alpha, *gates = tokens
    tokens = (q, k, l2_normalize(v), l2_normalize(alpha, norm=K**0.5), *gates)
    chunks = [jnp.pad(x, [(0, 0), (0, 1)] + [(0, 0)] * (x.ndim - 2)) for x in tokens]
    k, v, gamma = (chunks[i].reshape(B, -1, C, *chunks[i].shape[2:]) for i in (1, 2, 4))
    keys, values = (
        bounded(x.swapaxes(2, 3), gamma[..., i].swapaxes(2, 3)).swapaxes(2, 3)
        for i, x in enumerate((k, v))
    )
    gamma = jnp.stack([keys, values], axis=-1).reshape(B, -1, H, 2)[:, :T]
    given: Any = (*tokens[:4], gamma, tokens[5], state)
    expected: Any = trellis(*given, chunk_size=C, implementation="xla")
    x = after.tokens
    steps = bounded(x.k, x.key_gamma), bounded(x.v, x.value_gamma)
    x = x._replace(key_gamma=steps[0], value_gamma=steps[1])
    after = dataclasses.replace(after, tokens=x)
    close((after, whole[1]), expected, 1e-5)


@pytest.mark.slow
def test_steps_are_those_of_a_segment():
    tokens: Any = draw(B, T, H, K, K, K)
    state = trellis_init_state(B, H, K, K, K, C)
    expected = run("xla")(*tokens, state)
    step = functools.partial(trellis_step, bound_steps=True, normalize=True)
    reads = []
    for t in range(T):
        state, y = jax.jit(step)(*(x[:, t] for x in tokens), state)
        reads.append(y)
    close((state, jnp.stack(reads, axis=1)), expected, 1e-5)


def test_a_step_above_one_cannot_be_bounded():
    tokens = draw(1, 4, 1, 3, 3, 3)
    given: Any = (*tokens[:4], 2 * jnp.ones((1, 4, 1)), tokens[5])
    with pytest.raises(ValueError, match=r"gamma must lie in \[0.0, 1.0\]"):
        trellis(*given, bound_steps=True)
    one: Any = (*(x[:, 0] for x in given), trellis_init_state(1, 1, 3, 3, 3, 4))
    with pytest.raises(ValueError, match=r"gamma must lie in \[0.0, 1.0\]"):
        trellis_step(*one, bound_steps=True)
