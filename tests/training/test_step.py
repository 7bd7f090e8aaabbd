"""One update: accumulation, truncation, carried memory, batches that are not finite."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from memjax.data.batches.batch import Batch
from memjax.mechanisms import SlidingWindowConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.hmt.config import HMTConfig
from memjax.models.hmt.model import add_hmt
from memjax.models.loss import scored_mask, target_nll
from memjax.training.step import (
    StepConfig,
    TrainState,
    init_train_state,
    make_train_step,
)
from memjax.training.step import update as one_update
from tests import tiny

B, T, V, WINDOW = 4, 8, 13, 4
CONFIG = ModelConfig(
    mechanisms=(SlidingWindowConfig(8, 2, 1, 4, window=WINDOW),),
    num_layers=1,
    vocab_size=V,
    model_dim=8,
    hidden_dim=16,
    dtype="float32",
    remat=False,
)
MODEL = tiny.drawn(lambda: LanguageModel(CONFIG, key=jax.random.key(0)))
GRAPH, PARAMS = nnx.split(MODEL)
# A step of plain descent at rate 1 moves the parameters by the gradient.
DESCENT = optax.sgd(1.0)
NO_RESET = np.zeros(B, bool)


def text(length=T, seed=1):
    rng = np.random.default_rng(seed)
    return rng.integers(0, V, (B, length + 1), np.int32)


def batch_of(tokens, mask=None, reset=NO_RESET) -> Any:
    mask = np.ones(tokens[:, 1:].shape, np.float32) if mask is None else mask
    return Batch(tokens[:, :-1], tokens[:, 1:], mask, reset)


BATCH = batch_of(text())
# Rows of unequal weight: a mean of the parts' means would differ.
UNEVEN = batch_of(text(), np.float32(np.arange(B * T).reshape(B, T) % 7 < 3))


@functools.cache
def step_of(config):
    """The jitted update by descent, compiled once."""
    return jax.jit(make_train_step(MODEL, DESCENT, config))


def update(batch, **options):
    """One update from the initial state."""
    config = StepConfig(**options)
    return step_of(config)(init_train_state(MODEL, DESCENT, config, B), batch)


@pytest.fixture(scope="module")
def plain():
    return update(UNEVEN)


leaves = jax.tree.leaves


def subtract(a, b):
    return np.asarray(a) - np.asarray(b)


def close(actual, expected, tolerance=1e-6):
    chex.assert_trees_all_close(actual, expected, rtol=tolerance, atol=tolerance)


cross_entropy = jax.jit(optax.softmax_cross_entropy_with_integer_labels)


def mean_loss(params, batch, cut):
    """The loss by hand, the memory cut from the gradient at the `cut`s."""
    model: Any = nnx.merge(GRAPH, params)
    memory, total = model.init_state(B), 0.0
    for start, stop in zip((0, *cut), (*cut, T), strict=True):
        memory = jax.lax.stop_gradient(memory)
        tokens = jnp.asarray(batch.tokens[:, start:stop])
        memory, features = model.features(memory, tokens)
        targets = jnp.asarray(batch.targets[:, start:stop])
        mask = batch.mask[:, start:stop]
        total += (target_nll(model.logits, features, targets, V) * mask).sum()
    return total / batch.mask.sum()


def test_an_update_is_the_gradient_of_the_masked_mean(plain):
    state, metrics = plain
    loss, gradient = jax.jit(jax.value_and_grad(lambda p: mean_loss(p, UNEVEN, ())))(
        PARAMS
    )
    close(metrics["loss"], loss)
    close(state.params, jax.tree.map(subtract, PARAMS, gradient))
    squares = [np.square(leaf).sum() for leaf in map(np.asarray, leaves(gradient))]
    close(metrics["gradient_norm"], np.sqrt(sum(squares)), 1e-5)
    assert metrics["finite"] == 1 and state.step == 1 and state.memory == ()


@pytest.mark.slow
def test_accumulation_is_the_same_update(plain):
    state, metrics = update(UNEVEN, accumulate=B)
    close(state.params, plain[0].params)
    close(metrics, plain[1], 1e-5)


def test_masked_targets_do_not_count():
    mask, targets = BATCH.mask.copy(), BATCH.targets.copy()
    mask[:, 3], targets[:, 3] = 0, (targets[:, 3] + 1) % V
    other, step = BATCH._replace(targets=targets, mask=mask), step_of(StepConfig())
    state = init_train_state(MODEL, DESCENT, StepConfig(), B)
    chex.assert_trees_all_equal(
        step(state, other), step(state, BATCH._replace(mask=mask))
    )
    nothing, metrics = step(state, BATCH._replace(mask=np.zeros_like(mask)))
    chex.assert_trees_all_equal(nothing.params, state.params)
    assert metrics["loss"] == 0 and metrics["finite"] == 1


@pytest.mark.slow
def test_truncation_cuts_the_gradient_but_not_the_memory(plain):
    truncated, metrics = update(UNEVEN, bptt_blocks=1)
    close(metrics["loss"], plain[1]["loss"])
    gradient = jax.jit(jax.grad(lambda p: mean_loss(p, UNEVEN, (WINDOW,))))(PARAMS)
    close(truncated.params, jax.tree.map(subtract, PARAMS, gradient))
    # Values of the first block are learned through the memory alone.
    whole, cut = (
        nnx.merge(GRAPH, state.params).blocks[0].parameters().mechanism.value
        for state in (plain[0], truncated)
    )
    assert np.abs(whole - cut).max() > 1e-4


def test_bptt_over_all_blocks_is_no_truncation():
    state = init_train_state(MODEL, DESCENT, StepConfig(), B)

    def program(blocks):
        return str(
            jax.make_jaxpr(
                make_train_step(MODEL, DESCENT, StepConfig(bptt_blocks=blocks))
            )(state, BATCH)
        )

    assert program(2) == program(3) == program(0) != program(1)


@pytest.fixture(scope="module")
def adam():
    """A jitted update that carries memory, and the state after one."""
    transform, config = optax.adam(1e-2), StepConfig(carry_memory=True)
    step = jax.jit(make_train_step(MODEL, transform, config))
    state, _ = step(init_train_state(MODEL, transform, config, B), BATCH)
    return step, state


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_gradient_alone_that_is_not_finite_skips_the_update(value):
    """The loss is finite, and one element of one gradient is not."""
    transform = optax.adam(1e-2)
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    before = TrainState(
        jnp.zeros((), jnp.int32), params, transform.init(params), (), ()
    )
    gradients = {"w": np.ones((2, 3)), "b": np.array([0, value, 0])}
    gradients = jax.tree.map(np.float32, gradients)
    update = jax.jit(lambda *given: one_update(transform, *given))
    after, metrics = update(before, jnp.ones(()), gradients)
    assert metrics["loss"] == 1 and metrics["finite"] == 0
    assert not np.isfinite(metrics["gradient_norm"])
    chex.assert_trees_all_equal(after._replace(step=before.step), before)
    assert after.step == 1


@pytest.mark.parametrize("broken", ["parameters", "mask", "infinite mask"])
def test_non_finite_batch_changes_only_the_step(broken, adam):
    step, state = adam
    batch = batch_of(text(seed=2))
    match broken:
        case "parameters":
            leaves, structure = jax.tree.flatten(state.params)
            leaves[1] = np.array(leaves[1])
            leaves[1].flat[0] = np.nan
            state = state._replace(params=jax.tree.unflatten(structure, leaves))
        case "mask":
            batch.mask[1, 2] = np.nan
        case "infinite mask":
            batch.mask[1, 2] = np.inf
    after, metrics = step(state, batch)
    chex.assert_trees_all_equal(after._replace(step=state.step), state)
    assert after.step == state.step + 1 and metrics["finite"] == 0
    if broken != "parameters":
        # And the run goes on.
        after, metrics = step(after, batch_of(text(seed=3)))
        assert metrics["finite"] == 1 and after.step == state.step + 2


@pytest.fixture(scope="module")
def streams():
    """Two batches of a stream at rate 0, with and without accumulation."""
    tokens, still = text(2 * T), optax.sgd(0.0)
    reset = np.array([False, True, False, False])
    results = []
    for parts in (1, 2):
        config = StepConfig(carry_memory=True, accumulate=parts)
        step = jax.jit(make_train_step(MODEL, still, config))
        state = init_train_state(MODEL, still, config, B)
        state, first = step(state, batch_of(tokens[:, : T + 1], reset=~NO_RESET))
        results.append((first, step(state, batch_of(tokens[:, T:], reset=reset))))
    return tokens, results


@pytest.mark.slow
def test_carried_memory_joins_batches_and_resets_rows(streams):
    tokens, results = streams
    first, (state, second) = results[0]
    run = jax.jit(lambda memory, tokens: MODEL(memory, tokens))
    memory, logits = run(MODEL.init_state(B), tokens[:, :-1])
    fresh, after = run(MODEL.init_state(B), tokens[:, T:-1])
    logits = np.array(logits)
    logits[1, T:] = after[1]
    nll = np.asarray(cross_entropy(logits, tokens[:, 1:]))
    close(first["loss"], nll[:, :T].mean(), 1e-5)
    close(second["loss"], nll[:, T:].mean(), 1e-5)
    mask = np.array([False, True, False, False])

    def select(a, b):
        return np.where(mask.reshape(-1, *[1] * (a.ndim - 1)), b, a)

    close(state.memory, jax.tree.map(select, memory, fresh), 1e-5)


def test_accumulation_keeps_memories_with_their_rows(streams):
    _, ((_, (one, _)), (_, (two, _))) = streams
    close(two.memory, one.memory, 1e-5)


def test_loss_on_the_last_window_counts_real_targets_of_each_row():
    mask = np.ones((B, T), np.float32)
    # Row 0 ends in padding, row 1 has a gap, row 2 fewer targets than a window.
    mask[0, 6:], mask[1, 5], mask[2, 2:] = 0, 0, 0
    counted = np.zeros((B, T), np.float32)
    counted[0, 2:6], counted[1, [3, 4, 6, 7]] = 1, 1
    counted[2, :2], counted[3, 4:] = 1, 1
    found, _ = update(batch_of(text(), mask), loss_on="last")
    close(found.params, update(batch_of(text(), counted))[0].params)


def test_a_model_that_does_not_read_ahead_is_scored_everywhere(plain):
    found, _ = update(UNEVEN, loss_on="scored")
    close(found.params, plain[0].params)


@pytest.mark.slow
def test_hmt_with_retrieval_is_scored_from_j_on():
    # L = 4 and j = 1: target i is token i + 1, at place (i + 1) % 4 of its segment.
    memory = HMTConfig(
        segment_length=4,
        num_sensory_tokens=1,
        num_memories=2,
        summary_fraction=0.25,
        activations="keep",
    )
    key = jax.random.key(5)
    model = tiny.drawn(lambda: add_hmt(LanguageModel(CONFIG, key=key), memory, key=key))
    place = (np.arange(T) + 1) % 4
    assert model.first_scored == 1 and MODEL.first_scored == 0
    np.testing.assert_array_equal(scored_mask(T, 4, 1), place >= 1)
    causal = dataclasses.replace(memory, summary_source="previous")
    assert nnx.eval_shape(lambda: add_hmt(MODEL, causal, key=key)).first_scored == 0
    config = StepConfig(loss_on="scored")
    state = init_train_state(model, DESCENT, config, B)
    step = make_train_step(model, DESCENT, config)
    # Of the loss alone: nothing else is compiled.
    loss = jax.jit(lambda state, batch: step(state, batch)[1]["loss"])(state, BATCH)
    _, logits = jax.jit(lambda t: model(model.init_state(B), t))(BATCH.tokens)
    nll = np.asarray(cross_entropy(logits, BATCH.targets))
    close(loss, nll[:, place >= 1].mean(), 1e-5)
    assert set(state.params) >= {"initial_memory", "summary_prompt", "query", "key"}
    stream = StepConfig(loss_on="scored", carry_memory=True)
    with pytest.raises(ValueError, match="whole segments of 4 tokens .* got 7"):
        jax.eval_shape(
            make_train_step(model, DESCENT, stream),
            init_train_state(model, DESCENT, stream, B),
            batch_of(text(7)),
        )


@pytest.mark.parametrize(
    "sizes,message",
    [
        ((-1, 4, 0), "length must be at least 0"),
        ((8, 4, 5), r"first must be in \[0, 4\], got 5"),
    ],
)
def test_invalid_shardings_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        scored_mask(*sizes)


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(accumulate=3), "accumulate=3 must divide the batch of 4 rows"),
        (dict(bptt_blocks=3), None),
    ],
)
def test_batches_that_do_not_divide_are_refused(options, message):
    step = make_train_step(MODEL, DESCENT, StepConfig(**options))
    state = init_train_state(MODEL, DESCENT, StepConfig(), B)
    batch = BATCH if message else batch_of(text(20))
    message = message or "bptt_blocks=3 of 4 tokens must divide the context of 20"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(step, state, batch)


@pytest.mark.parametrize(
    "wrong,message",
    [
        (dict(bptt_blocks=-1), "bptt_blocks must be >= 0, got -1"),
        (dict(accumulate=0), "accumulate must be >= 1, got 0"),
    ],
)
def test_invalid_options_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        StepConfig(**wrong)
