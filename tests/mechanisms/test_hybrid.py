"""Hybrid of a sliding window and a memory."""

import dataclasses
import functools
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
X = np.random.default_rng(1).standard_normal((B, T, D), np.float32)


@functools.partial(jax.jit, static_argnums=0)
def read(config, params, x):
    """The state after x and its outputs."""
    return apply(config, params, init_state(config, B), x)


@jax.jit
def read_window(params, x):
    window = WINDOW.build()
    return window.apply(params.attention, window.init_state(B), x)[1]


@functools.cache
def drawn(config):
    return jax.jit(functools.partial(init_params, config))(jax.random.key(0))


def opened(params):
    amount = jnp.ones_like(params.balance.amount)
    return params._replace(balance=params.balance._replace(amount=amount))


@pytest.mark.slow
def test_initialised_layer_equals_its_window_and_learns():
    params = drawn(CONFIG)
    expected = read_window(params, X)

    def loss(amount):
        balance = params.balance._replace(amount=amount)
        new = params._replace(balance=balance)
        y = read(CONFIG, new, X)[1]
        return (y**2).sum(), y

    learn = jax.jit(jax.grad(loss, has_aux=True))
    gradient, y = learn(params.balance.amount)
    np.testing.assert_allclose(y, expected, atol=1e-6)
    assert np.all(np.abs(gradient) > 1e-4)


@pytest.mark.slow
def test_memory_has_only_tokens_that_left_the_window():
    def memory_of(x):
        return np.asarray(read(CONFIG, opened(drawn(CONFIG)), x)[0].memory)

    inside, outside = X.copy(), X.copy()
    inside[:, T - W :] += 1.0
    outside[:, T - W - 1] += 1.0
    np.testing.assert_array_equal(memory_of(X), memory_of(inside))
    assert np.abs(memory_of(X) - memory_of(outside)).max() > 1e-3


def test_the_first_tokens_are_those_of_the_window():
    """Nothing has left it yet, and an empty memory has no part in the output."""
    params = opened(drawn(CONFIG))
    expected = np.asarray(read_window(params, X))
    y = np.asarray(read(CONFIG, params, X)[1])
    np.testing.assert_allclose(y[:, :W], expected[:, :W], atol=1e-6)
    assert np.abs(y[:, W:] - expected[:, W:]).max() > 1e-2


def test_bias_makes_no_key_before_a_token_has_left_the_window():
    params = drawn(CONFIG)
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
    params = jax.device_get(opened(drawn(shared)))
    assert params.features is not None
    draws = np.random.default_rng(2)
    features = FeatureParams(
        *(draws.standard_normal(leaf.shape, np.float32) for leaf in params.features)
    )

    def twice(leaf):
        return np.repeat(leaf, 2, axis=0)

    def of_pairs(flat):
        return np.repeat(flat.reshape(2, 4), 2, axis=0).reshape(-1)

    same = params._replace(
        features=features._replace(
            key=twice(features.key),
            value=twice(features.value),
            key_bias=of_pairs(features.key_bias),
        ),
        memory=jax.tree.map(
            # Weights of gates are [X, M], biases [M], starts [M, ...].
            lambda leaf: np.repeat(leaf, 2, axis=1 if leaf.shape[0] == 16 else 0),
            params.memory,
        ),
    )
    params = params._replace(features=features)
    state, y = read(shared, params, X)
    others, expected = read(apart, same, X)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    found, whole = jax.tree.leaves(state.memory), jax.tree.leaves(others.memory)
    assert sum(leaf.size for leaf in found) <= sum(leaf.size for leaf in whole) / 2 + B
    _, window = read(shared, drawn(shared), X)
    assert np.abs(np.subtract(y, window)).max() > 1e-2


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
