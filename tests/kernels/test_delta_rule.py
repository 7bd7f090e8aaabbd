"""The delta-rule op: chunks of matrix products against the token loop."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax_kernels import delta_rule
from memjax_kernels.delta_rule.reference import delta_rule_reference
from memjax_kernels.delta_rule.xla import delta_rule_xla

B, H, K, V = 2, 2, 4, 3


def draw(length, seed=0) -> Any:
    """Queries, unit keys, values, rates and a memory that is not empty."""
    q, k, v, beta, state = jax.random.split(jax.random.key(seed), 5)
    keys = jax.random.normal(k, (B, length, H, K))
    return (
        jax.random.normal(q, (B, length, H, K)),
        keys / jnp.linalg.norm(keys, axis=-1, keepdims=True),
        jax.random.normal(v, (B, length, H, V)),
        jax.nn.sigmoid(jax.random.normal(beta, (B, length, H))),
        jax.random.normal(state, (B, H, K, V)),
    )


@functools.cache
def values_and_gradients(run):
    def both(arguments, weights):
        values, pull = jax.vjp(run, *arguments)
        return values, pull(weights)

    return jax.jit(both)


def close(actual, expected, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def numpy_loop(*arguments):
    """S <- S (I - beta k k^T) + beta v k^T, in float64 and matrix form."""
    float64 = lambda x: np.array(x, np.float64)
    q, k, v, beta, state = map(float64, arguments)
    reads = np.zeros_like(v)
    for b, h in np.ndindex(B, H):
        s = state[b, h].T
        for t in range(q.shape[1]):
            key, rate = k[b, t, h], beta[b, t, h]
            s = s @ (np.eye(K) - rate * np.outer(key, key))
            s = s + rate * np.outer(v[b, t, h], key)
            reads[b, t, h] = s @ q[b, t, h]
        state[b, h] = s.T
    return state, reads


def test_the_reference_is_the_recurrence():
    arguments = draw(9)
    close(jax.jit(delta_rule_reference)(*arguments), numpy_loop(*arguments))


@pytest.mark.parametrize("length", [1, 129])
def test_chunks_equal_the_token_loop_with_all_gradients(length):
    arguments = draw(length)
    weights = draw(length, seed=1)[4], draw(length, seed=1)[2]
    run = functools.partial(delta_rule, implementation="xla")
    actual = values_and_gradients(run)(arguments, weights)
    expected = values_and_gradients(delta_rule_reference)(arguments, weights)
    close(actual[0], expected[0])
    close(actual[1], expected[1], 5e-5)
    assert all(np.abs(g).max() > 1e-3 for g in actual[1])


@pytest.mark.parametrize("chunk", [1, 3, 9, 64])
def test_chunk_boundaries_do_not_show(chunk):
    arguments = draw(9)
    run = jax.jit(delta_rule_xla, static_argnames="chunk_size")
    close(run(*arguments, chunk_size=chunk), numpy_loop(*arguments))


def test_no_state_is_an_empty_memory_and_the_default_is_the_fast_form():
    *tokens, _ = draw(9)
    default = lambda *tokens: delta_rule(*tokens)
    fast = lambda *tokens: delta_rule(*tokens, implementation="xla")
    assert str(jax.make_jaxpr(default)(*tokens)) == str(jax.make_jaxpr(fast)(*tokens))
    close(jax.jit(default)(*tokens), numpy_loop(*tokens, np.zeros((B, H, K, V))))


def test_a_full_rate_recalls_the_last_value_of_a_key():
    _, k, v, beta, state = draw(9)
    _, reads = jax.jit(delta_rule)(k, k, v, jnp.ones_like(beta), state)
    close(reads, v)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_half_precision_tokens_keep_a_float32_memory(implementation):
    *tokens, state = draw(9)
    low = [x.astype(jnp.bfloat16) for x in tokens]
    run = jax.jit(delta_rule, static_argnames="implementation")
    after, reads = run(*low, state, implementation=implementation)
    assert (after.dtype, reads.dtype) == (jnp.float32, jnp.bfloat16)
    # What remains is the rounding of the tokens and of the reads alone.
    rounded = [x.astype(jnp.float32) for x in low]
    expected_state, expected = numpy_loop(*rounded, state)
    close(after, expected_state)
    assert np.abs(reads.astype(jnp.float32) - expected).max() < 0.02


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="one of .*'reference', 'xla'.*, got 'cuda'"):
        # Without the annotations' own check.
        inspect.unwrap(delta_rule)(*draw(2), implementation="cuda")
