"""The Memorizing Transformer against its equations, and the baseline's table."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.mechanisms import AttentionConfig, MemorizingConfig
from memjax.mechanisms.mixers.memorizing import apply, init_params, init_state

B, T, D, H, G, K = 2, 11, 8, 4, 2, 4
# Without RoPE: `test_contract` compares positions with those of single tokens.
HEADS: dict[str, Any] = dict(
    model_dim=D, num_heads=H, num_kv_heads=G, head_dim=K, rope_theta=None
)


def softmax(scores):
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def memorizing_transformer(q, k, v, share, block, queue, top_k):
    """One head [T, K], token by token, in float64."""
    outputs = []
    for t in range(len(q)):
        start = t // block * block
        scores = k @ q[t] / np.sqrt(K)
        y = softmax(scores[start : t + 1]) @ v[start : t + 1]
        first = max(start - queue, 0)
        if start:
            nearest = first + np.argsort(-scores[first:start])[:top_k]
            y += share * (softmax(scores[nearest]) @ v[nearest] - y)
        outputs.append(y)
    return np.stack(outputs)


@pytest.mark.parametrize("top_k", [None, 2])
def test_it_is_the_memorizing_transformer(top_k):
    """With a queue longer than a block, so that it has tokens of two."""
    config = MemorizingConfig(**HEADS, block=3, queue=4, top_k=top_k)
    params = init_params(config, jax.random.key(0))
    bias = np.array([-1.0, 0.0, 0.5, 2.0], np.float32)
    params = params._replace(gate_bias=jnp.asarray(bias))
    x = jax.random.normal(jax.random.key(1), (B, T, D))
    _, y = jax.jit(apply, static_argnums=0)(config, params, init_state(config, B), x)

    weights = (np.asarray(w, np.float64) for w in params.attention[:4])
    query, key, value, output = weights
    q, k, v = (np.einsum("btd,dhk->bthk", x, w) for w in (query, key, value))
    heads = np.zeros(q.shape)
    for b, h in np.ndindex(B, H):
        head = (q[b, :, h], k[b, :, h // 2], v[b, :, h // 2])
        share = 1 / (1 + np.exp(-bias[h]))
        heads[b, :, h] = memorizing_transformer(*head, share, 3, 4, top_k)
    expected = np.einsum("bthk,hkd->btd", heads, output)
    np.testing.assert_allclose(y, expected, atol=2e-5)


def test_sizes_are_those_of_elastic_memorys_table_1():
    """N (K + V) H numbers in the queue and H parameters more than attention has."""
    sizes = (720, 8, 8, 90)
    config = MemorizingConfig(*sizes)
    state = jax.eval_shape(lambda: init_state(config, 1))
    numbers = sum(leaf.size for leaf in (state.keys, state.values))
    # The block's own keys and values, which every mechanism with blocks keeps.
    block = 2 * 2048 * 8 * 90
    assert numbers - block == 540 * (90 + 90) * 8 == 777_600  # "0.8M"

    def parameters(config):
        shapes = jax.eval_shape(config.build().init_params, jax.random.key(0))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    assert parameters(config) - parameters(AttentionConfig(*sizes)) == 8


def test_nearest_tokens_are_in_the_queue():
    with pytest.raises(ValueError, match="top_k must be at most queue=4, got 5"):
        MemorizingConfig(**HEADS, queue=4, top_k=5)


@pytest.mark.parametrize("sizes", [{"block": 8}, {"queue": 3}])
def test_a_state_of_other_sizes_is_refused(sizes):
    config = MemorizingConfig(**HEADS, block=4, queue=6)
    state = dataclasses.replace(config, **sizes).build().init_state(B)
    mechanism, x = config.build(), jnp.zeros((B, T, D))
    params = jax.eval_shape(mechanism.init_params, jax.random.key(0))
    for call, given in ((mechanism.apply, x), (mechanism.step, x[:, 0])):
        with pytest.raises(ValueError, match=r"state must have keys \[B, 10, 8\], got"):
            call(params, state, given)
