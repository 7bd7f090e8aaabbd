"""A memory of chunks and attention in one model, which carries both as it trains."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from memjax.data.batches.batch import Batch
from memjax.mechanisms import AttentionConfig, TrellisConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.training.step import StepConfig, init_train_state, make_train_step
from tests import tiny

B, T, V = 2, 6, 11
CONFIG = ModelConfig(
    mechanisms=(
        TrellisConfig(8, 2, 4, 4, slots=3, chunk_size=4),
        AttentionConfig(8, 2, 1, 4, capacity=2 * T),
    ),
    num_layers=2,
    vocab_size=V,
    model_dim=8,
    hidden_dim=16,
    dtype="float32",
    remat=False,
)
TOKENS = np.random.default_rng(1).integers(0, V, (B, 2 * T + 1), np.int32)


@pytest.mark.slow
def test_a_hybrid_trains_on_a_stream():
    model = tiny.drawn(lambda: LanguageModel(CONFIG, key=jax.random.key(0)))
    options = StepConfig(carry_memory=True)
    state = init_train_state(model, optax.sgd(0.1), options, B)
    step = jax.jit(make_train_step(model, optax.sgd(0.1), options))
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
    np.testing.assert_array_equal(trellis.memory.memory.position, [2, 0])
    np.testing.assert_array_equal(attention.length, [T, 2 * T])
