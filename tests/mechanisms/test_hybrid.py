"""Hybrid of a sliding window and a memory."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.mechanisms import (
    DeltaNetConfig,
    HybridConfig,
    InfiniConfig,
    LatticeConfig,
    SlidingWindowConfig,
)
from memjax.mechanisms.hybrid import (
    FeatureParams,
    Left,
    apply,
    init_params,
    init_state,
    memory_inputs,
)

B, T, D, W = 2, 11, 8, 4
HEADS: dict[str, Any] = dict(model_dim=D, num_heads=4, num_kv_heads=2, head_dim=4)
WINDOW = SlidingWindowConfig(**HEADS, window=W, sinks=1)
CONFIG = HybridConfig(WINDOW, DeltaNetConfig(16, 4, 4, 4))
X = jax.random.normal(jax.random.key(1), (B, T, D))


def opened(params):
    amount = jnp.ones_like(params.balance.amount)
    return params._replace(balance=params.balance._replace(amount=amount))


@pytest.mark.slow
def test_initialised_layer_equals_its_window_and_learns():
    params = init_params(CONFIG, jax.random.key(0))
    window = WINDOW.build()
    _, expected = window.apply(params.attention, window.init_state(B), X)

    def loss(amount):
        balance = params.balance._replace(amount=amount)
        new = params._replace(balance=balance)
        y = apply(CONFIG, new, init_state(CONFIG, B), X)[1]
        return (y**2).sum(), y

    learn = jax.jit(jax.grad(loss, has_aux=True))
    gradient, y = learn(params.balance.amount)
    np.testing.assert_allclose(y, expected, atol=1e-6)
    assert np.all(np.abs(gradient) > 1e-4)


@pytest.mark.slow
def test_memory_has_only_tokens_that_left_the_window():
    params = opened(init_params(CONFIG, jax.random.key(0)))

    def read(x):
        return apply(CONFIG, params, init_state(CONFIG, B), x)[0].memory

    memory, inside = read(X), read(X.at[:, T - W :].add(1.0))
    np.testing.assert_array_equal(memory, inside)
    outside = read(X.at[:, T - W - 1].add(1.0))
    assert np.abs(memory - outside).max() > 1e-3


def test_the_first_tokens_are_those_of_the_window():
    """Nothing has left it yet, and an empty memory has no part in the output."""
    params = opened(init_params(CONFIG, jax.random.key(0)))
    window = WINDOW.build()
    _, expected = window.apply(params.attention, window.init_state(B), X)
    _, y = apply(CONFIG, params, init_state(CONFIG, B), X)
    np.testing.assert_allclose(y[:, :W], expected[:, :W], atol=1e-6)
    assert np.abs(y[:, W:] - expected[:, W:]).max() > 1e-2


def test_bias_makes_no_key_before_a_token_has_left_the_window():
    params = init_params(CONFIG, jax.random.key(0))
    assert params.features is not None
    biased = params.features._replace(key_bias=jnp.ones(16))
    nothing = jnp.zeros((B, T, 2, 4))
    left = Left(nothing, nothing, jnp.arange(T)[None].repeat(B, 0) > 2)
    params, q = params._replace(features=biased), jnp.ones((B, T, 4, 4))
    _, keys, _, _ = memory_inputs(CONFIG, params, q, left)
    np.testing.assert_array_equal(keys[:, :3], 0)
    assert np.all(np.abs(keys[:, 3:]) > 0)


@pytest.mark.parametrize(
    "memory", [DeltaNetConfig(16, 4, 4, 4), LatticeConfig(16, 4, value_dim=4)]
)
def test_shared_memory_equals_equal_memories_of_each_head(memory):
    """Queries of a group read what heads of their own would hold, written alike."""
    shared = HybridConfig(WINDOW, dataclasses.replace(memory, num_heads=2))
    apart = HybridConfig(WINDOW, memory)
    params = opened(init_params(shared, jax.random.key(0)))
    assert params.features is not None
    maps = jax.random.split(jax.random.key(2), len(params.features))
    features = FeatureParams(
        *(
            jax.random.normal(key, leaf.shape)
            for key, leaf in zip(maps, params.features, strict=True)
        )
    )

    def twice(leaf):
        return jnp.repeat(leaf, 2, axis=0)

    def of_pairs(flat):
        return jnp.repeat(flat.reshape(2, 4), 2, axis=0).reshape(-1)

    same = params._replace(
        features=features._replace(
            key=twice(features.key),
            value=twice(features.value),
            key_bias=of_pairs(features.key_bias),
        ),
        memory=jax.tree.map(
            # Weights of gates are [X, M], biases [M], starts [M, ...].
            lambda leaf: jnp.repeat(leaf, 2, axis=1 if leaf.shape[0] == 16 else 0),
            params.memory,
        ),
    )
    params = params._replace(features=features)
    state, y = apply(shared, params, init_state(shared, B), X)
    others, expected = apply(apart, same, init_state(apart, B), X)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    found, whole = jax.tree.leaves(state.memory), jax.tree.leaves(others.memory)
    assert sum(leaf.size for leaf in found) <= sum(leaf.size for leaf in whole) / 2 + B
    window = apply(
        shared, init_params(shared, jax.random.key(0)), init_state(shared, B), X
    )
    assert np.abs(y - window[1]).max() > 1e-2


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (DeltaNetConfig(16, 1, 4, 4), "memory.num_heads must be 4 or 2 .*, got 1"),
        (DeltaNetConfig(8, 4, 4, 4), "memory.model_dim must be 16 .*, got 8"),
        (InfiniConfig(4, 4, 4, 4), "memory.num_kv_heads must be 2 .*, got 4"),
        (InfiniConfig(4, 2, 4, 8), "memory.value_dim must be 4 .*, got 8"),
    ],
)
def test_a_memory_of_other_heads_is_refused(memory, message):
    with pytest.raises(ValueError, match=message):
        HybridConfig(WINDOW, memory)
