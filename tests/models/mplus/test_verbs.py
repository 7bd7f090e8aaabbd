"""What M+'s verbs promise: which rows are read, when, and what they refuse."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.models import Sampling
from memjax.models.base import Model
from memjax.models.checkpoints.memory_state import load_memory, save_memory
from memjax.models.mplus import pool as short_term_pool
from memjax.models.mplus.build import add_mplus
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.read import ReadOptions
from tests import tiny

B, K, N, C, R = 2, 2, 4, 4, 3
CONFIG = MPlusConfig(
    num_memory_tokens=K,
    pool_size=N,
    chunk_size=C,
    min_chunk_size=1,
    num_retrieved=R,
    store_size=12,
    key_dim=4,
    rank=2,
)


@functools.cache
def model():
    return tiny.drawn(
        # Layers among others are in `test_official.py` and `test_mplus.py`.
        lambda: add_mplus(tiny.make_llama(num_layers=1), CONFIG, key=jax.random.key(1))
    )


@functools.cache
def injected():
    """Six chunks: the pool is full, and eight rows are in the store, more than R."""
    state = model().init_state(B)
    return model().inject(state, tiny.tokens(1, B, 6 * C))


def read(state, tokens, *options):
    return model().read(state, tokens, *options)[1]


@pytest.mark.slow
def test_retrieval_is_causal():
    store = injected().store
    assert store is not None and store.num_valid.tolist() == [8, 8]
    tokens = tiny.tokens(2, B, 5)
    logits = read(injected(), tokens)
    for seed in range(3):
        other = np.concatenate([tokens[:, :1], tiny.tokens(seed, B, 4)], axis=1)
        np.testing.assert_array_equal(read(injected(), other)[:, 0], logits[:, 0])


# Rows of the pool.


@pytest.mark.parametrize("num_valid", [0, 4, 6, 8])
def test_empty_rows_are_replaced_first(num_valid):
    rows, new, draws = 8, 3, 20
    kept = jax.vmap(
        lambda key: short_term_pool.draw_kept(
            key, 2, rows, rows - new, jnp.int32(num_valid)
        )
    )(jax.random.split(jax.random.key(0), draws))
    assert np.all(np.diff(kept, axis=-1) > 0) and kept.min() >= 0 and kept.max() < rows
    held = (kept >= rows - num_valid).sum(axis=-1)
    assert np.all(held == min(num_valid, rows - new))
    # Where some must go, every row may.
    assert num_valid < 6 or {*range(rows - num_valid, rows)} <= {*kept.ravel().tolist()}


NEW = jnp.zeros((B, 1, K, 16), jnp.float32)


@pytest.mark.parametrize(
    "rows", [[1, 0], [1, 1], [2, 4], [-1, 2]], ids=["falling", "twice", "beyond", "-1"]
)
def test_row_indices_must_be_distinct_and_rising(rows):
    given = jnp.broadcast_to(jnp.array(rows), (B, 1, K))
    state = model().init_state(B)
    with pytest.raises(ValueError, match=r"dropped must be .* in rising .*\[0, 4\)"):
        model().update(state, NEW, given)
    options = ReadOptions(NEW, True, given)
    with pytest.raises(ValueError, match=r"kept_rows must be .* in rising .*\[0, 4\)"):
        model().read(state, tiny.tokens(0, B, 3), options)


@pytest.mark.slow  # Fast tests are also run with all annotations checked.
@pytest.mark.parametrize(
    "mask", [jnp.array([True]), jnp.ones(3, bool), jnp.array([0, 1]), jnp.array(True)]
)
def test_reset_takes_a_mask_of_the_batch(mask):
    models: list[Model] = [model(), tiny.llama()]
    for any_model in models:
        state = any_model.init_state(B)
        with pytest.raises(ValueError, match=r"mask must be bool \[B\] with B=2, as"):
            any_model.reset(state, mask)


# The store after `inject`.


@pytest.mark.slow
def test_call_after_inject_retrieves():
    for name in ("whole chunks", "an open chunk"):
        state = injected()
        if name == "an open chunk":
            state = model().inject(state, tiny.tokens(2, B, 1))
        held = int(state.length[0])
        state, _ = model()(state, tiny.tokens(3, B, 1))
        visible = state.cache.visible.sum(axis=1).tolist()
        assert visible == [1 + R + N + held + 1] * B, name


# Texts of unequal lengths in one batch.

LENGTHS = jnp.array([2, 9])


def alone(tree, b):
    return jax.tree.map(lambda x: x[b : b + 1], tree)


@pytest.mark.slow
def test_ragged_inject_and_read_equal_single_rows():
    given, question = tiny.tokens(4, B, 9), tiny.tokens(5, B, 4)
    asked = jnp.array([4, 2])
    # One element has an open chunk, and the other none.
    first = model().inject(injected(), given, jnp.array([0, 3]))
    assert first.length.tolist() == [0, 3]
    state = model().inject(first, given, LENGTHS)
    # The whole question chooses rows, and its padding none.
    whole = ReadOptions(prompt_length=4)
    logits, trace = model().trace_read(state, question, whole, asked)
    # The first is padded as it is written, the second as it reads.
    own = model().inject(alone(first, 0), given[:1, : LENGTHS[0]])

    # Rows of the last layer are thousands long: rounding is relative to them.
    def rows(x):
        x = np.asarray(x)
        return x / (1 + np.abs(x).max(axis=-1, keepdims=True))

    unit = functools.partial(jax.tree.map, rows)
    tiny.assert_close(unit(alone(state, 0)), unit(own))
    options = ReadOptions(prompt_length=2)
    expected, own_trace = model().trace_read(alone(state, 1), question[1:, :2], options)
    assert trace.scores is not None
    tiny.assert_close(trace.scores[:, 1:], own_trace.scores)
    tiny.assert_close(logits[1:, :2], expected)
    # Padding is neither written nor read.
    other = given.at[0, 2:].set(0)
    again = model().inject(first, other, LENGTHS)
    tiny.assert_equal(again, state)


@pytest.mark.slow
def test_ragged_prompts_equal_single_rows():
    greedy, key = Sampling(temperature=0.0), jax.random.key(0)
    prompts, lengths = tiny.tokens(6, B, 5), jnp.array([5, 2])

    def answer(state, prompts, lengths=None):
        return model().generate(
            state, prompts, 4, key=key, sampling=greedy, lengths=lengths
        )

    both = answer(injected(), prompts, lengths)
    one = answer(alone(injected(), 1), prompts[1:, :2])
    np.testing.assert_array_equal(both[1], one[0])


@pytest.mark.slow  # Fast tests are also run with all annotations checked.
@pytest.mark.parametrize(
    "lengths",
    [jnp.array([1]), jnp.array([1.0, 2.0]), jnp.array([0, 1]), jnp.array([1, 4])],
)
def test_invalid_lengths_are_refused(lengths):
    state, tokens = model().init_state(B), tiny.tokens(0, B, 3)
    with pytest.raises(ValueError, match="lengths must be in"):
        model().read(state, tokens, ReadOptions(), lengths)
    if lengths.tolist() != [0, 1]:
        with pytest.raises(ValueError, match="lengths must be in"):
            model().inject(state, tokens, lengths)


# Number formats.


@pytest.mark.slow
def test_memory_dtype_follows_the_backbone(tmp_path):
    """So that a decoded token copies no cache, and a store is as large as its rows."""
    key = jax.random.key(1)
    sizes: Any = dict(dtype="bfloat16", num_layers=1)
    low = tiny.drawn(lambda: add_mplus(tiny.make_llama(**sizes), CONFIG, key=key))
    state = low.inject(low.init_state(B), tiny.tokens(1, B, 6 * C))
    assert state.store is not None
    found = [state.pool, *state.cache.keys, *state.cache.values]
    found += [layer.rows for layer in state.store.layers]
    assert {x.dtype for x in found} == {jnp.dtype(jnp.bfloat16)}

    def kind(x):
        return (x.shape, x.dtype, x.weak_type)

    assert jax.tree.map(kind, state) == jax.tree.map(kind, low.init_state(B))
    cache, logits = low.read(state, tiny.tokens(4, B, 5), ReadOptions(max_new_tokens=1))
    # Tokens for which rounding changes no choice of a row: near, and no more.
    exact = read(injected(), tiny.tokens(4, B, 5))
    assert 0 < jnp.linalg.norm(logits - exact) < 0.3 * jnp.linalg.norm(exact)
    program = jax.jit(lambda cache, tokens: low.decode(cache, tokens)[0])
    lowered = program.trace(cache, tiny.tokens(3, B, 1)).jaxpr
    whole = cache.keys[0].shape
    copies = [
        eqn
        for eqn in lowered.eqns
        if eqn.primitive.name == "convert_element_type"
        and eqn.outvars[0].aval.shape == whole
    ]
    assert not copies
    save_memory(tmp_path / "memory", low, state)
    tiny.assert_equal(load_memory(tmp_path / "memory", low), state)
    wide = low.replace(config=dataclasses.replace(CONFIG, memory_dtype="float32"))
    assert wide.init_state(B).pool.dtype == jnp.float32
