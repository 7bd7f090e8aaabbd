"""Synthetic tasks: what counts follows from what came before, and only that."""

import jax
import numpy as np
import pytest

from memjax.data import associative_recall, copy_task

KEY = jax.random.key(0)


def test_copy_task_repeats_after_the_delimiter():
    batch = copy_task(KEY, batch=3, length=5, vocab=7)
    sequence = np.concatenate([batch.tokens, batch.targets[:, -1:]], axis=1)
    assert sequence.shape == (3, 11)
    np.testing.assert_array_equal(sequence[:, :5], sequence[:, 6:])
    assert (sequence[:, 5] == 0).all()
    assert sequence[:, :5].min() >= 1 and sequence.max() < 7
    np.testing.assert_array_equal(batch.mask, [[0] * 5 + [1] * 5] * 3)
    np.testing.assert_array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    assert batch.reset.shape == (3,) and bool(batch.reset.all())


def test_recall_asks_for_values_that_were_shown():
    batch = associative_recall(KEY, batch=4, pairs=6, vocab=20)
    assert batch.tokens.shape == (4, 23)
    for tokens, targets, mask in zip(*map(np.asarray, batch[:3]), strict=True):
        shown = dict(zip(tokens[0:12:2], tokens[1:12:2], strict=True))
        assert len(shown) == 6 and max(shown) < 10 <= min(shown.values())
        asked = np.flatnonzero(mask)
        assert sorted(tokens[asked]) == sorted(shown)
        assert [shown[name] for name in tokens[asked]] == targets[asked].tolist()
        assert asked.min() >= 12


def test_recall_varies_order_rows_and_keys():
    batch = associative_recall(KEY, batch=8, pairs=6, vocab=64)
    names = np.asarray(batch.tokens)
    assert any(not np.array_equal(row[0:12:2], row[12::2]) for row in names)
    assert len({tuple(row[:12]) for row in names}) == 8
    other = associative_recall(jax.random.key(1), batch=8, pairs=6, vocab=64)
    assert not np.array_equal(other.tokens, batch.tokens)


def test_tasks_are_pure_and_jittable():
    for task in (copy_task, associative_recall):
        jitted = jax.jit(task, static_argnums=(1, 2, 3))
        for a, b in zip(task(KEY, 2, 3, 8), jitted(KEY, 2, 3, 8), strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: copy_task(KEY, 0, 3, 8), "batch=0 must be at least 1"),
        (lambda: copy_task(KEY, 2, 0, 8), "length=0"),
        (lambda: copy_task(KEY, 2, 3, 2), "vocab=2 must be at least 3"),
        (lambda: associative_recall(KEY, 0, 3, 8), "batch=0"),
        (lambda: associative_recall(KEY, 2, 0, 8), "pairs=0"),
        (lambda: associative_recall(KEY, 2, 5, 9), "vocab=9 must be at least 10"),
    ],
)
def test_bad_sizes_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
