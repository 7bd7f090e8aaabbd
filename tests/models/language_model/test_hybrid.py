"""Recurrent memories and attention in one model: it trains, carries and writes on."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from memjax.data.batches.batch import Batch
from memjax.mechanisms import AttentionConfig, TrellisConfig
from memjax.models import LanguageModel, ModelConfig, Sampling, generate
from memjax.training.step import StepConfig, init_train_state, make_train_step
from tests import tiny

B, T, V, NEW = 2, 6, 11, 4
CONFIG = ModelConfig(
    mechanisms=(
        TrellisConfig(8, 2, 4, 4, slots=3, chunk_size=4),
        AttentionConfig(8, 2, 1, 4, capacity=2 * T + NEW),
    ),
    num_layers=2,
    vocab_size=V,
    model_dim=8,
    hidden_dim=16,
    dtype="float32",
    remat=False,
)
TOKENS = np.random.default_rng(1).integers(0, V, (B, 2 * T + 1), np.int32)


@functools.cache
def model():
    return tiny.drawn(lambda: LanguageModel(CONFIG, key=jax.random.key(0)))


@pytest.mark.slow
def test_a_hybrid_trains_on_a_stream():
    options = StepConfig(carry_memory=True)
    state = init_train_state(model(), optax.sgd(0.1), options, B)
    step = jax.jit(make_train_step(model(), optax.sgd(0.1), options))
    before = state.params
    for start, reset in ((0, [False, False]), (T, [True, False])):
        tokens = TOKENS[:, start : start + T]
        targets = TOKENS[:, start + 1 : start + T + 1]
        batch = Batch(tokens, targets, jnp.ones((B, T)), jnp.array(reset))
        state, metrics = step(state, batch)
        assert metrics["finite"] == 1
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max() > 0, before, state.params)
    assert all(jax.tree.leaves(moved))
    trellis, attention = state.memory
    # Rows of 6 and 12 tokens, in chunks of 4.
    np.testing.assert_array_equal(trellis.memory.memory.slots.position, [2, 0])
    np.testing.assert_array_equal(attention.length, [T, 2 * T])


@pytest.mark.slow
def test_hybrid_generation_equals_argmax():
    state, drawn, *_ = generate(
        model(),
        model().init_state(B),
        TOKENS[:, :T],
        NEW,
        key=jax.random.key(2),
        sampling=Sampling(temperature=0.0),
    )
    text = np.concatenate([TOKENS[:, :T], drawn], axis=1)
    after, logits = tiny.method(model(), "__call__", model().init_state(B), text)
    np.testing.assert_array_equal(drawn, np.argmax(logits, axis=-1)[:, T - 1 : -1])
    chex.assert_trees_all_close(state, after, rtol=1e-5, atol=1e-5)
