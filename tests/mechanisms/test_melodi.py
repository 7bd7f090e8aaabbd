"""Melodi against its equations, and against the tables of Elastic Memory."""

from typing import Any

import jax
import numpy as np
import pytest

from memjax.mechanisms import AttentionConfig, MelodiConfig
from memjax.mechanisms.mixers.melodi import EPSILON, apply, init_params, init_state

B, T, D, H, G, K = 2, 11, 8, 4, 2, 4
# Without RoPE: `test_contract` compares positions with those of single tokens.
HEADS: dict[str, Any] = dict(
    model_dim=D, num_heads=H, num_kv_heads=G, head_dim=K, rope_theta=None
)


def norm(x):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPSILON)


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def heads_of(x, weight):
    """[T, D] as [H, T, K]; heads of a group have the same keys and values."""
    y = np.einsum("td,dhk->htk", x, weight)
    return np.repeat(y, H // len(y), axis=0)


def melodi(config, params, x):
    """A text [T, D], whose last block is not complete, a block at a time."""
    query, key, value, output = params.attention[:4]
    size, outputs, memory, queue = config.memory_tokens, [], x[:0], []
    for start in range(0, len(x), config.block):
        block = x[start : start + config.block]
        tokens = np.concatenate([block, params.summary_prompt])
        seen = np.concatenate([memory, tokens])
        scores = heads_of(tokens, query) @ heads_of(seen, key).transpose(0, 2, 1)
        causal = np.tril(np.ones((len(tokens), len(seen)), bool), len(memory))
        weights = softmax(np.where(causal, scores / np.sqrt(K), -np.inf))
        y = weights @ heads_of(seen, value)
        if queue:
            past = np.concatenate(queue)
            scores = heads_of(tokens, query) @ heads_of(past, key).transpose(0, 2, 1)
            read = softmax(scores / np.sqrt(K)) @ heads_of(past, value)
            y += (read - y) / (1 + np.exp(-params.gate_bias[:, None]))
        out = np.einsum("htk,hkd->td", y, output)
        outputs.append(out[: len(block)])
        if len(block) == config.block:
            h = tokens + out
            mixed = params.mixing.T @ norm(h) + params.mixing_bias[:, None]
            memory = norm(h[config.block :] + mixed[:size])
            if config.long_tokens:
                queue = [*queue, norm(mixed[size:])][-config.long_blocks :]
    return np.concatenate(outputs)


@pytest.mark.parametrize("long_tokens", [0, 2])
def test_it_is_melodi(long_tokens):
    """Of three blocks, so that a long-term memory of two forgets the first."""
    config = MelodiConfig(
        **HEADS, block=3, memory_tokens=2, long_tokens=long_tokens, long_blocks=2
    )
    params = init_params(config, jax.random.key(0))
    rng = np.random.default_rng(0)
    noise = {
        name: rng.normal(size=getattr(params, name).shape).astype(np.float32)
        for name in ("mixing_bias", "gate_bias")
        if getattr(params, name) is not None
    }
    params = params._replace(**noise)
    x = jax.random.normal(jax.random.key(1), (B, T, D))
    _, y = jax.jit(apply, static_argnums=0)(config, params, init_state(config, B), x)
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    expected = [melodi(config, exact, np.asarray(row, np.float64)) for row in x]
    np.testing.assert_allclose(y, np.stack(expected), atol=2e-5)


@pytest.mark.parametrize(
    ("tokens", "millions"),
    [(45, 1.5), (90, 3.1), (180, 6.4), (360, 13.5), (720, 30.1)],
)
def test_sizes_are_those_of_elastic_memorys_tables(tokens, millions):
    """Table 1's numbers of memory, and the parameters of tables 2 and 3.

    Those count the mixture too, which table 1 leaves out.
    """
    heads = (720, 8, 8, 90)
    config = MelodiConfig(*heads, memory_tokens=tokens)
    memory = jax.eval_shape(lambda: init_state(config, 1)).memory
    numbers = memory.tokens.size + memory.mixed.size
    # "0.8M" is 1x; twice the tokens, twice the memory.
    assert 12 * numbers == 12 * 2 * tokens * 720 == tokens // 45 * 777_600

    def parameters(config):
        shapes = jax.eval_shape(config.build().init_params, jax.random.key(0))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    added = parameters(config) - parameters(AttentionConfig(*heads))
    assert round(12 * added / 1e6, 1) == millions
