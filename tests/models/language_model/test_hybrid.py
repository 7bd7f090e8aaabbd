"""Recurrent memories and attention in one model: it trains, carries and writes on."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from memjax.data.batches.batch import Batch
from memjax.mechanisms import AttentionConfig, LatticeConfig, TrellisConfig
from memjax.models import LanguageModel, ModelConfig, Sampling, generate
from memjax.training.step import StepConfig, init_train_state, make_train_step

B, T, V, NEW = 2, 6, 11, 4
CONFIG = ModelConfig(
    mechanisms=(
        TrellisConfig(8, 2, 4, 4, slots=3, chunk_size=4),
        AttentionConfig(8, 2, 1, 4, capacity=2 * T + NEW),
        LatticeConfig(8, 2, value_dim=4, slots=3, chunk_size=4, forget="l2"),
    ),
    num_layers=3,
    vocab_size=V,
    model_dim=8,
    hidden_dim=16,
    dtype="float32",
    remat=False,
)
TOKENS = jax.random.randint(jax.random.key(1), (B, 2 * T + 1), 0, V).astype(jnp.int32)


@functools.cache
def tiny():
    return LanguageModel(CONFIG, key=jax.random.key(0))


@pytest.mark.slow
def test_a_hybrid_trains_on_a_stream():
    options = StepConfig(carry_memory=True)
    state = init_train_state(tiny(), optax.sgd(0.1), options, B)
    step = jax.jit(make_train_step(tiny(), optax.sgd(0.1), options))
    before = state.params
    for start, reset in ((0, [False, False]), (T, [True, False])):
        tokens = TOKENS[:, start : start + T]
        targets = TOKENS[:, start + 1 : start + T + 1]
        batch = Batch(tokens, targets, jnp.ones((B, T)), jnp.array(reset))
        state, metrics = step(state, batch)
        assert metrics["finite"] == 1
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max() > 0, before, state.params)
    assert all(jax.tree.leaves(moved))
    trellis, _, lattice = state.memory
    # Rows of 6 and 12 tokens, in chunks of 4.
    np.testing.assert_array_equal(trellis.memory.memory.slots.position, [2, 0])
    np.testing.assert_array_equal(lattice.memory.memory.position, [2, 0])


@pytest.mark.slow
def test_hybrid_generation_equals_argmax():
    state, drawn, *_ = generate(
        tiny(),
        tiny().init_state(B),
        TOKENS[:, :T],
        NEW,
        key=jax.random.key(2),
        sampling=Sampling(temperature=0.0),
    )
    text = jnp.concatenate([TOKENS[:, :T], drawn], axis=1).astype(jnp.int32)
    graph, params = nnx.split(tiny())

    def run(params, text):
        return nnx.merge(graph, params)(tiny().init_state(B), text)

    after, logits = jax.jit(run)(params, text)
    np.testing.assert_array_equal(drawn, np.argmax(logits[:, T - 1 : -1], axis=-1))
    chex.assert_trees_all_close(state, after, rtol=1e-5, atol=1e-5)
