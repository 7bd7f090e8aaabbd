"""A step that is skipped keeps its resets, and one bad memory harms no other."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from memjax.data.batches.batch import Batch
from memjax.mechanisms import SlidingWindowConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.training.step import StepConfig, init_train_state, make_train_step
from tests import tiny

B, T, V = 3, 4, 11
CONFIG = ModelConfig(
    mechanisms=(SlidingWindowConfig(8, 2, 1, 4, window=4),),
    num_layers=2,
    vocab_size=V,
    model_dim=8,
    hidden_dim=8,
    dtype="float32",
    remat=False,
)
NONE = np.zeros(B, bool)


def batch(seed: int, reset: Any = NONE, mask: float = 1.0) -> Batch:
    tokens = np.random.default_rng(seed).integers(0, V, (B, T + 1)).astype(np.int32)
    ones = np.ones((B, T), np.float32)
    ones[0, 0] = mask
    return Batch(tokens[:, :-1], tokens[:, 1:], ones, np.asarray(reset))  # pyright: ignore


@pytest.fixture(scope="module", name="training")
def _training() -> Any:
    """The model, its jitted step, and the state after one batch."""
    model = LanguageModel(CONFIG, key=jax.random.key(0))
    config, transform = StepConfig(carry_memory=True), optax.sgd(0.1)
    step = jax.jit(make_train_step(model, transform, config))
    state, metrics = step(init_train_state(model, transform, config, B), batch(1))
    assert metrics["finite"] == 1
    return model, step, state


def row(memory: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], memory)


def spoil(memory: Any, index: int, value: float) -> Any:
    """The memory with every number of one batch element replaced."""
    return jax.tree.map(
        lambda leaf: (
            leaf.at[index].set(value)
            if jnp.issubdtype(leaf.dtype, jnp.floating)
            else leaf
        ),
        memory,
    )


def test_a_skipped_step_keeps_the_resets_of_its_batch(training: Any) -> None:
    model, step, state = training
    due = np.array([False, True, False])
    after, metrics = step(state, batch(2, due, mask=np.nan))
    assert metrics["finite"] == 0
    tiny.assert_equal(after.params, state.params)
    tiny.assert_equal(row(after.memory, 1), row(model.init_state(B), 1))
    for index in (0, 2):
        tiny.assert_equal(row(after.memory, index), row(state.memory, index))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_memory_alone_is_reset(training: Any, value: float) -> None:
    """The step is made, and as if the element's document had begun."""
    _, step, state = training
    ruined = state._replace(memory=spoil(state.memory, 1, value))
    after, metrics = step(ruined, batch(2))
    assert metrics["finite"] == 1
    expected, _ = step(state, batch(2, [False, True, False]))
    tiny.assert_equal(after, expected)


def test_memory_overflowing_in_a_skipped_step_is_reset_alone(
    training: Any,
) -> None:
    model, step, state = training
    strained = state._replace(memory=spoil(state.memory, 1, 3e38))
    after, metrics = step(strained, batch(2))
    assert metrics["finite"] == 0
    tiny.assert_equal(row(after.memory, 1), row(model.init_state(B), 1))
    tiny.assert_equal(row(after.memory, 0), row(state.memory, 0))
    # The next step is made.
    assert step(after, batch(3))[1]["finite"] == 1


def test_if_all_memories_are_non_finite_none_is_reset(training: Any) -> None:
    _, step, state = training
    ruined = state._replace(params=jax.tree.map(lambda x: x * np.nan, state.params))
    after, metrics = step(ruined, batch(2))
    assert metrics["finite"] == 0
    tiny.assert_equal(after.memory, state.memory)
