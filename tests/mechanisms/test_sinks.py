"""Attention sinks of a sliding window: StreamingLLM."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.mechanisms.layers import projections
from memjax.mechanisms.sliding_window import SlidingWindowConfig, apply, init_state
from memjax.mechanisms.sliding_window import whole as read_whole

B, T, W, S = 2, 13, 4, 2
compiled = jax.jit(apply, static_argnums=0)
CONFIG = SlidingWindowConfig(8, 4, 2, 4, rope_theta=100.0, window=W, sinks=S)


def turned(x, position):
    """RoPE of one head's query or key, in float64."""
    half = len(x) // 2
    angles = position * 100.0 ** (-np.arange(half) / half)
    pairs = (x[:half] + 1j * x[half:]) * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag])


def attended(query, keys, values):
    """The newest token's attention to a cache, at the positions inside the cache."""
    last = turned(query, len(keys) - 1)
    scores = [last @ turned(key, i) / np.sqrt(len(key)) for i, key in enumerate(keys)]
    weights = np.exp(scores) / np.exp(scores).sum()
    return weights @ values


def streaming_llm(params, x):
    """What the paper's cache gives: the first S tokens, then the last W."""
    query, key, value, output = (np.asarray(w, np.float64) for w in params[:4])
    x = np.asarray(x, np.float64)
    q, k, v = (np.einsum("btd,dhk->bthk", x, w) for w in (query, key, value))
    y = np.zeros(q.shape)
    for t in range(x.shape[1]):
        first = max(0, t + 1 - W)
        kept = [*range(min(S, first)), *range(first, t + 1)]
        for b, h in np.ndindex(len(x), q.shape[2]):
            g = h // 2
            y[b, t, h] = attended(q[b, t, h], k[b, kept, g], v[b, kept, g])
    return np.einsum("bthk,hkd->btd", y, output)


def test_the_cache_is_that_of_streaming_llm():
    params = projections.init_params(CONFIG, jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (B, T, 8))
    expected = streaming_llm(params, x)
    _, y = compiled(CONFIG, params, init_state(CONFIG, B), x)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    # Short enough that nothing is left out: full attention.
    short = read_whole(CONFIG, params, x[:, : W + S])
    np.testing.assert_allclose(short, expected[:, : W + S], atol=1e-5)


def test_padding_is_no_sink():
    params = projections.init_params(CONFIG, jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (B, T, 8))
    lengths = jnp.array([1, T - 3])
    state, _ = compiled(CONFIG, params, init_state(CONFIG, B), x, None, lengths)
    for row, length in enumerate(lengths):
        one = init_state(CONFIG, 1)
        alone, _ = compiled(CONFIG, params, one, x[row : row + 1, : int(length)])
        pairs = zip(jax.tree.leaves(state), jax.tree.leaves(alone), strict=True)
        for found, expected in pairs:
            np.testing.assert_allclose(found[row], expected[0], atol=1e-6)


def test_more_sinks_than_window_are_refused():
    with pytest.raises(ValueError, match=r"sinks must be in \[0, window=4\], got 5"):
        SlidingWindowConfig(8, 2, 2, 4, window=4, sinks=5)
