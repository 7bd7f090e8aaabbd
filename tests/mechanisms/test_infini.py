"""A window and Infini's memory against the equations of Infini-attention."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.mechanisms import HybridConfig, InfiniConfig, SlidingWindowConfig
from memjax.mechanisms.cells.infini import EPSILON
from memjax.mechanisms.hybrid import apply, init_params, init_state

B, T, D, H, G, K = 2, 12, 8, 4, 2, 4
# The paper's keys and queries have no position in the memory; none at all here, so that
# the window is a segment's local attention.
HEADS: dict[str, Any] = dict(
    model_dim=D, num_heads=H, num_kv_heads=G, head_dim=K, rope_theta=None
)


def sigma(x):
    return np.where(x > 0, x, np.exp(np.minimum(x, 0)) - 1) + 1


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def infini_attention(q, k, v, gate, segment, update, norm):
    """One head [T, K] by eqs. 1 to 6, in float64, a segment at a time."""
    memory, total, outputs = np.zeros((K, K)), np.zeros(K), []
    share = 1 / (1 + np.exp(-gate))
    for start in range(0, len(q), segment):
        here = slice(start, start + segment)
        causal = np.tril(np.ones((segment, segment), bool))
        scores = np.where(causal, q[here] @ k[here].T / np.sqrt(K), -np.inf)
        local = softmax(scores) @ v[here]
        features = sigma(k[here])
        if start == 0:
            # Nothing is remembered yet: the paper's first segment divides by zero.
            outputs.append(local)
            old = 0.0
        else:
            asked = sigma(q[here])
            retrieved = asked @ memory / (asked @ total)[:, None]
            if norm:
                mean = (retrieved**2).mean(axis=-1, keepdims=True)
                retrieved /= np.sqrt(mean + EPSILON)
            outputs.append(share * retrieved + (1 - share) * local)
            old = features @ memory / (features @ total)[:, None]
        memory = memory + features.T @ (v[here] - (old if update == "delta" else 0.0))
        total = total + features.sum(axis=0)
    return np.concatenate(outputs)


@pytest.mark.parametrize(
    ("window", "update", "norm", "equal"),
    [
        # Segments of one token: all is as in the paper.
        (1, "linear", False, slice(None)),
        (1, "delta", True, slice(None)),
        # Where a segment ends, the window is that segment.
        (3, "linear", False, slice(2, None, 3)),
    ],
)
def test_it_is_infini_attention(window, update, norm, equal):
    config = HybridConfig(
        SlidingWindowConfig(**HEADS, window=window),
        InfiniConfig(H, G, K, K, update, norm),
        gate="head",
    )
    params = jax.jit(functools.partial(init_params, config))(jax.random.key(0))
    gate = np.array([-1.0, 0.0, 0.5, 2.0], np.float32)
    params = params._replace(balance=params.balance._replace(bias=gate))
    x = np.random.default_rng(1).standard_normal((B, T, D), np.float32)
    y = jax.jit(
        lambda: apply(config, params, init_state(config, B), jnp.asarray(x))[1]
    )()

    projections = (np.asarray(w, np.float64) for w in params.attention[:4])
    query, key, value, output = projections
    q, k, v = (np.einsum("btd,dhk->bthk", x, w) for w in (query, key, value))
    heads = np.zeros(q.shape)
    for b, h in np.ndindex(B, H):
        head = (q[b, :, h], k[b, :, h // 2], v[b, :, h // 2], gate[h])
        heads[b, :, h] = infini_attention(*head, window, update, norm)
    expected = np.einsum("bthk,hkd->btd", heads, output)
    np.testing.assert_allclose(np.asarray(y)[:, equal], expected[:, equal], atol=2e-5)


def test_sizes_are_those_of_elastic_memorys_table_1():
    """K V H numbers in the memory, besides the sums of keys; H parameters more."""
    heads = (720, 8, 8, 90)
    window = SlidingWindowConfig(*heads, window=2048)
    config = HybridConfig(window, InfiniConfig(8, 8, 90, 90, norm=True), gate="head")
    state = jax.eval_shape(lambda: init_state(config, 1))
    assert 12 * state.memory.matrix.size == 12 * 90 * 90 * 8 == 777_600  # "0.8M"

    def parameters(config):
        shapes = jax.eval_shape(config.build().init_params, jax.random.key(0))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    assert 12 * (parameters(config) - parameters(window)) == 96
