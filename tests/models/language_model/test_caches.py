"""Caches of full attention: as large as the text needs, and in the model's dtype."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memjax.mechanisms import AttentionConfig, SlidingWindowConfig
from tests import tiny

B, T = 2, 9
TOKENS = tiny.tokens(1, B, T)
MIXER = AttentionConfig(16, 4, 2, 4)


def model(**changes):
    grows = dataclasses.replace(MIXER, capacity=1000, initial_slots=4)
    return tiny.llama(mechanisms=(grows,), num_layers=1, **changes)


def slots(state):
    return {memory.keys.shape[1] for memory in state}


@pytest.fixture(name="whole", scope="module")
def _whole():
    large = dataclasses.replace(MIXER, capacity=1000)
    full = tiny.llama(mechanisms=(large,), num_layers=1)
    return tiny.method(full, "__call__", full.init_state(B), TOKENS)


def test_init_state_capacity():
    found = model()
    for capacity, expected in ((None, 4), (7, 7), (5000, 1000)):
        assert slots(found.init_state(B, capacity)) == {expected}
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        found.init_state(B, 0)
    with pytest.raises(ValueError, match="at most capacity=1000, got 1001"):
        dataclasses.replace(MIXER, capacity=1000, initial_slots=1001)


def test_growing_caches_changes_no_result(whole):
    found, state = model(), model().init_state(B)
    logits = []
    for cut in (TOKENS[:, :3], TOKENS[:, 3:5], TOKENS[:, 5:]):
        state, y = found(state, cut)
        logits.append(y)
    # A power of two, at least 256, as soon as 4 are too few.
    assert slots(state) == {256}
    chex.assert_trees_all_close(
        np.concatenate(logits, axis=1), whole[1], rtol=1e-5, atol=1e-5
    )
    assert slots(found.reserve(state, 300)) == {512}
    assert slots(found.reserve(state, 1000 - T)) == {1000}
    assert found.remaining(state) == 1000 - T
    with pytest.raises(ValueError, match="1000 tokens .* has room for 991 more"):
        found.reserve(state, 1000)


def test_caches_grow_inside_jit_by_call_length(whole):
    graph, params = nnx.split(model())
    call = jax.jit(lambda params, *given: nnx.merge(graph, params)(*given))
    state, logits = call(params, model().init_state(B), TOKENS)
    assert slots(state) == {256}
    chex.assert_trees_all_close(logits, whole[1], rtol=1e-5, atol=1e-5)
    # As many slots as the shapes show; from the first token without one it is NaN.
    state, _ = call(params, model().init_state(B), TOKENS[:, :2])
    assert slots(state) == {4}
    _, logits = call(params, state, TOKENS[:, 2:6])
    assert np.isfinite(logits[:, :2]).all() and np.isnan(logits[:, 2:]).all()


def test_a_reset_keeps_the_slots():
    found = model()
    state, _ = found(found.init_state(B), TOKENS)
    state = found.reset(state, jnp.array([True, False]))
    assert slots(state) == {256} and state[0].length.tolist() == [0, T]
    assert not state[0].keys[0].any() and state[0].keys[1].any()


def test_keys_and_values_are_kept_in_the_models_dtype_without_loss():
    mechanisms = (
        dataclasses.replace(MIXER, capacity=16),
        SlidingWindowConfig(16, 4, 2, 4, window=4),
    )
    low = tiny.llama(mechanisms=mechanisms, dtype="bfloat16")
    state = low.init_state(B)
    high = tuple(block.functions.init_state(B) for block in low.blocks)

    def dtypes(state):
        return {memory.keys.dtype for memory in state}

    assert dtypes(state) == {jnp.bfloat16.dtype} and dtypes(high) == {jnp.float32.dtype}
    for cut in (TOKENS[:, :5], TOKENS[:, 5:6]):
        state, logits = tiny.method(low, "__call__", state, cut)
        high, expected = tiny.method(low, "__call__", high, cut)
        np.testing.assert_array_equal(logits, expected)
    assert dtypes(state) == {jnp.bfloat16.dtype}
    assert dataclasses.replace(MIXER, capacity=8).slots == 8
