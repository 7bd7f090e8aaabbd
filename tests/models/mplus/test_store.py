"""M+'s long-term store against plain lists: what stays, and what is found."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memjax.models.mplus import store as long_term_store
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.state import LayerStore

B, L, K, D, KEYS, R = 2, 2, 2, 1, 2, 3
SIZES: dict[str, Any] = dict(
    num_memory_tokens=K,
    pool_size=4,
    chunk_size=4,
    min_chunk_size=1,
    num_retrieved=R,
    key_dim=KEYS,
)
# Neither a multiple of K nor of what hypothesis gives at a time.
OLDEST = MPlusConfig(**SIZES, store_size=7)
BY_FREQUENCY = MPlusConfig(
    **SIZES, store_size=16, eviction="frequency", merge_every=2, recalls=3.0
)
LEGACY = MPlusConfig(**SIZES, store_size=16, legacy=True, merge_every=2, recalls=3.0)

same = np.testing.assert_array_equal
_append = jax.jit(long_term_store.append, static_argnums=0)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _retrieve(config, store, layer, queries, asked):
    return long_term_store.retrieve(config, store, layer, queries, asked)


def told(born):
    """What the pool dropped, [B, L, K]: every part of a row tells when it was born."""
    born = np.asarray(born, np.int32)

    def wide(i, d):
        return jnp.asarray(np.repeat(born[:, i, :, None], d, 2), jnp.float32)

    return tuple(
        LayerStore(wide(i, D), 2 * wide(i, KEYS), jnp.asarray(born[:, i]))
        for i in range(L)
    )


def held(store, row, layer):
    """When the filled rows were born, by the three parts that tell it."""
    count, part = int(store.num_valid[row]), store.layers[layer]
    born = np.asarray(part.born)[row, :count]
    same(np.asarray(part.rows)[row, :count], np.repeat(born[:, None], D, 1))
    same(np.asarray(part.keys)[row, :count], 2 * np.repeat(born[:, None], KEYS, 1))
    return born.tolist()


def batches(updates):
    """Different births in [-20, ...) for every update, row of the batch and layer."""
    size = updates * K
    order = st.permutations(range(-20, size - 20))
    return st.lists(order, min_size=B * L, max_size=B * L).map(
        lambda all_: np.array(all_).reshape(B, L, updates, K)
    )


masks = st.lists(
    st.lists(st.booleans(), min_size=B, max_size=B), min_size=9, max_size=9
)


@settings(deadline=None, max_examples=30)
@given(batches(9), masks)
def test_oldest_rows_are_evicted(born, taken):
    store, given_ = long_term_store.empty(OLDEST, B, L, D), {}
    for update, mask in enumerate(taken):
        new = born[:, :, update]
        store = _append(OLDEST, store, told(new), jnp.array(mask))
        for row in range(B):
            for layer in range(L):
                all_ = given_.setdefault((row, layer), [])
                all_.extend(new[row, layer].tolist() if mask[row] else [])
                expected = sorted(all_)[-OLDEST.store_size :]
                assert sorted(held(store, row, layer)) == expected
    assert store.num_pending.tolist() == [0] * B


class Program:
    """One row and layer of the published program's store."""

    def __init__(self, config):
        self.config, self.rows, self.recalls, self.cache = config, [], [], []

    def drop(self, rows):
        self.cache += rows
        if len(self.cache) < self.config.merge_every * K:
            return
        rows = self.rows + self.cache
        recalls = self.recalls + [self.config.recalls] * len(self.cache)
        left = [(r, f - 1) for r, f in zip(rows, recalls, strict=True) if f - 1 > 0.01]
        if len(left) > self.config.num_retrieved:
            rows, recalls = map(list, zip(*left, strict=True))
        self.rows, self.recalls, self.cache = rows, recalls, []


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(batches(9), masks)
def test_eviction_by_recall_frequency(born, taken):
    config = BY_FREQUENCY
    store = long_term_store.empty(config, B, L, D)
    programs = {(row, i): Program(config) for row in range(B) for i in range(L)}
    for update, mask in enumerate(taken):
        new = born[:, :, update]
        store = _append(config, store, told(new), jnp.array(mask))
        for (row, layer), program in programs.items():
            if mask[row]:
                program.drop(new[row, layer].tolist())
            assert held(store, row, layer) == program.rows + program.cache
            assert store.num_pending[row] == len(program.cache)
            merged = len(program.rows)
            same(np.asarray(store.recalls)[row, :merged], program.recalls)


def test_at_least_r_rows_remain():
    """No more than R would be left: nothing goes, and no frequency falls."""
    config = MPlusConfig(
        **SIZES, store_size=8, eviction="frequency", merge_every=1, recalls=2.0
    )
    store, program = long_term_store.empty(config, B, L, D), Program(config)
    for update in range(4):
        new = np.full((B, L, K), update * K) + np.arange(K)
        store = _append(config, store, told(new), jnp.array([True, False]))
        program.drop(new[0, 0].tolist())
        assert held(store, 0, 0) == program.rows and held(store, 1, 0) == []
        same(np.asarray(store.recalls)[0, : len(program.rows)], program.recalls)
    assert len(program.rows) == 4 and set(program.recalls) == {1.0}


def filled(config, born, keys, merged=None):
    """A store of given rows, in places that hold something else behind them."""
    store = long_term_store.empty(config, B, L, D)
    count, layers = len(born), []
    # By numpy: jax would compile a program for every count.
    for layer in store.layers:
        junk = jax.tree.map(lambda x: np.full(x.shape, 99, x.dtype), layer)
        junk.rows[:, :count, 0] = np.arange(count) + 1.0
        junk.keys[:, :count] = keys
        junk.born[:, :count] = born
        layers.append(jax.tree.map(jnp.asarray, junk))
    fresh = 0 if merged is None else count - merged
    return store._replace(
        layers=tuple(layers),
        num_valid=jnp.asarray(np.full(B, count, np.int32)),
        num_pending=jnp.asarray(np.full(B, fresh, np.int32)),
    )


def test_equal_age_keeps_the_stored_row():
    keys = np.zeros((OLDEST.store_size, KEYS))
    store = filled(OLDEST, [5] * OLDEST.store_size, keys)
    same_age = _append(OLDEST, store, told(np.full((B, L, K), 5)), jnp.ones(B, bool))
    for old, new in zip(store.layers, same_age.layers, strict=True):
        same(old.rows, new.rows)
    # The younger of two new rows replaces one stored row, the older one none.
    new = np.broadcast_to([4, 6], (B, L, K))
    after = _append(OLDEST, store, told(new), jnp.ones(B, bool))
    assert sorted(after.layers[1].born[0].tolist()) == [5] * (OLDEST.store_size - 1) + [
        6
    ]


def test_row_order_is_independent_of_other_batch_elements():
    """Another batch element's store is full, and its rows are replaced."""
    keys = np.zeros((OLDEST.store_size, KEYS))
    full = filled(OLDEST, range(OLDEST.store_size), keys)
    few, none = jnp.array([3, OLDEST.store_size]), jnp.array([3, 0])
    new = np.broadcast_to([7, 8], (B, L, K))
    beside_full, beside_none = (
        _append(OLDEST, full._replace(num_valid=n), told(new), jnp.ones(B, bool))
        for n in (few, none)
    )
    assert beside_full.layers[0].born[1, :2].tolist() == [8, 7]
    for a, b in zip(beside_full.layers, beside_none.layers, strict=True):
        jax.tree.map(lambda a, b: same(a[0], b[0]), a, b)


def test_row_order_when_the_clock_wraps():
    times = (2**31 - 3 + np.arange(9)).astype(np.int32)
    assert times.min() < 0 < times.max()
    keys = np.zeros((OLDEST.store_size, KEYS))
    # From the third row on the clock is negative.
    store = filled(OLDEST, times[[6, 0, 3, 1, 5, 2, 4]], keys)
    found = find(OLDEST, store, 0, [(1, 1, True)] * T)
    assert found.chosen[0].tolist() == [1, 2, 0]
    new = np.broadcast_to(times[7:], (B, L, K))
    after = _append(OLDEST, store, told(new), jnp.ones(B, bool))
    assert {*after.layers[1].born[0].tolist()} == {*times[2:].tolist()}


@pytest.mark.parametrize("remain", [R, R + 1])
def test_rows_are_evicted_only_if_more_than_r_remain(remain):
    config = MPlusConfig(
        **SIZES, store_size=16, eviction="frequency", merge_every=1, recalls=2.0
    )
    count, alive = R + 3, remain - K
    store = filled(config, range(count), np.zeros((count, KEYS)))
    recalls = jnp.where(jnp.arange(config.store_size) < alive, 2.0, 1.0)
    store = store._replace(recalls=jnp.tile(recalls[None], (B, 1)))
    new = np.broadcast_to([7, 8], (B, L, K))
    after = _append(config, store, told(new), jnp.ones(B, bool))
    evicts = remain > R
    assert after.num_valid.tolist() == [remain if evicts else count + K] * B
    stay = [2.0] * alive + [1.0] * (count - alive) + [2.0] * K
    expected = [1.0] * remain if evicts else stay
    same(after.recalls[0, : len(expected)], expected)


T = 3
ROWS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(-2, 2), st.integers(-2, 2)), max_size=7
)
QUERIES = st.lists(
    st.tuples(st.integers(-1, 1), st.integers(-1, 1), st.booleans()),
    min_size=T,
    max_size=T,
)


def find(config, store, layer, queries):
    vectors = np.array([q[:2] for q in queries], np.float32)
    asked = np.array([q[2] for q in queries])
    # The second row of the batch asks nothing.
    both = np.stack([asked, np.zeros_like(asked)])
    return _retrieve(config, store, layer, np.tile(vectors[None], (B, 1, 1)), both)


def probabilities(keys, queries):
    """p in float64, by its definition."""
    asked = np.array([q[:2] for q in queries if q[2]], float).reshape(-1, KEYS)
    logits = asked @ np.asarray(keys, float).reshape(-1, KEYS).T
    return (1 / (1 + np.exp(-logits))).mean(axis=0)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(ROWS, QUERIES)
def test_top_rows_are_retrieved_oldest_first(rows, queries):
    """Few different numbers, so that many scores and births are alike."""
    born, keys = [row[0] for row in rows], [row[1:] for row in rows]
    store = filled(OLDEST, born, np.array(keys, float).reshape(-1, KEYS))
    found = find(OLDEST, store, 1, queries)
    scores, count = np.asarray(found.scores[0]), len(rows)
    assert np.all(np.isneginf(scores[count:]))
    assert np.all(np.isneginf(found.scores[1])) and not found.real[1].any()
    if not any(q[2] for q in queries):
        assert not found.real.any() and not found.rows.any()
        return
    np.testing.assert_allclose(scores[:count], probabilities(keys, queries), atol=1e-6)
    best = sorted(range(count), key=lambda place: (-scores[place], place))[:R]
    expected = sorted(best, key=lambda place: (born[place], place))
    real = np.asarray(found.real[0])
    # Nothing stands before what was found.
    assert real.tolist() == [False] * (R - len(best)) + [True] * len(best)
    assert np.asarray(found.chosen)[0, real].tolist() == expected
    same(np.asarray(found.rows)[0, real, 0], np.array(expected) + 1.0)
    assert not np.asarray(found.rows)[0, ~real].any()
    # Rows of no batch neighbour's making.
    assert not found.rows[1].any()


def test_ties_retrieve_the_first():
    born, keys = [5, 1, 4, 2, 3], np.zeros((5, KEYS))
    found = find(OLDEST, filled(OLDEST, born, keys), 0, [(1, 1, True)] * T)
    # Places 0, 1, 2, by their births.
    assert found.chosen[0].tolist() == [1, 2, 0]


@pytest.mark.slow
@pytest.mark.parametrize("merged", range(R + 2))
def test_legacy_repeats_a_store_of_fewer_than_r_rows(merged):
    """Of [0 ... merged) repeated, the last R; the drop cache counts from R rows on."""
    born = [7, 6, 6, 5, 8, 0][: merged + 2]
    keys = np.arange(merged + 2)[:, None] * np.ones((1, KEYS))
    store = filled(LEGACY, born, keys, merged)
    found = find(LEGACY, store, 1, [(1, 1, True)] * T)
    if merged == 0:
        assert not found.real.any() and not found.rows.any()
        return
    if merged < R:
        places = (list(range(merged)) * R)[-R:]
    else:
        places = sorted(range(merged + 2), key=lambda place: -place)[:R]
    # Rising ages, turned round: of equal ages the last comes first.
    places = sorted(places) if merged >= R else places
    expected = sorted(places, key=lambda place: -born[place])[::-1]
    assert found.chosen[0].tolist() == expected and found.real[0].all()
    same(found.rows[0, :, 0], np.array(expected) + 1.0)
    probability = probabilities(keys, [(1, 1, True)])
    np.testing.assert_allclose(found.scores[0, : merged + 2], probability, atol=1e-6)


def test_order_of_rows_of_equal_age():
    born, keys = [5, 1, 1, 5, 1], np.zeros((5, KEYS))
    for order, expected in (("rising", [1, 2, 0]), ("falling", [2, 1, 0])):
        config = dataclasses.replace(OLDEST, equal_ages=order)
        found = find(config, filled(config, born, keys), 0, [(1, 1, True)] * T)
        assert found.chosen[0].tolist() == expected


@pytest.mark.parametrize("config", [OLDEST, BY_FREQUENCY, LEGACY])
def test_empty_store_retrieves_nothing(config):
    store = long_term_store.empty(config, B, L, D)
    found = find(config, store, 0, [(1, 1, True)] * T)
    assert not found.real.any() and not found.rows.any()
    assert np.all(np.isneginf(found.scores))
