"""Synthetic tasks: scored positions follow from earlier ones."""

import jax
import numpy as np
import pytest

from memjax.data import associative_recall, copy_task, multi_query_recall

KEY = jax.random.key(0)
# Eagerly each operation is a program of its own.
recall = jax.jit(associative_recall, static_argnums=(1, 2, 3))
queries = jax.jit(
    multi_query_recall,
    static_argnums=(1, 2, 3, 4),
    static_argnames=("power", "fillers"),
)


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


def test_recall_queries_values_that_were_shown():
    batch = recall(KEY, 8, 6, 20)
    assert batch.tokens.shape == (8, 23)
    for tokens, targets, mask in zip(*map(np.asarray, batch[:3]), strict=True):
        shown = dict(zip(tokens[0:12:2], tokens[1:12:2], strict=True))
        assert len(shown) == 6 and max(shown) < 10 <= min(shown.values())
        asked = np.flatnonzero(mask)
        assert sorted(tokens[asked]) == sorted(shown)
        assert [shown[name] for name in tokens[asked]] == targets[asked].tolist()
        assert asked.min() >= 12


def test_recall_varies_order_rows_and_keys():
    batch = recall(KEY, 8, 6, 20)
    names = np.asarray(batch.tokens)
    assert any(not np.array_equal(row[0:12:2], row[12::2]) for row in names)
    assert len({tuple(row[:12]) for row in names}) == 8
    other = recall(jax.random.key(1), 8, 6, 20)
    assert not np.array_equal(other.tokens, batch.tokens)


@pytest.mark.slow
def test_tasks_are_pure_and_jittable():
    for task, sizes in (
        (copy_task, (2, 3, 8)),
        (associative_recall, (2, 3, 8)),
        (multi_query_recall, (2, 3, 16, 12)),
    ):
        # Each lambda is traced anew.
        drawn = [
            jax.jit(lambda key, task=task, sizes=sizes: task(key, *sizes))(KEY)
            for _ in range(2)
        ]
        for a, b in zip(*drawn, strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: copy_task(KEY, 0, 3, 8), "batch must be at least 1, got 0"),
        (lambda: copy_task(KEY, 2, 0, 8), "length must be .*got 0"),
        (lambda: copy_task(KEY, 2, 3, 2), "vocab must be at least 3, got 2"),
        (lambda: associative_recall(KEY, 0, 3, 8), "batch must be .*got 0"),
        (lambda: associative_recall(KEY, 2, 0, 8), "pairs must be .*got 0"),
        (lambda: associative_recall(KEY, 2, 5, 9), "vocab must be at least 10, got 9"),
        (lambda: multi_query_recall(KEY, 0, 2, 8, 8), "batch must be .*got 0"),
        (lambda: multi_query_recall(KEY, 1, 0, 8, 8), "pairs must be .*got 0"),
        (
            lambda: multi_query_recall(KEY, 1, 2, 7, 8),
            "least 8, got 7",
        ),
        (lambda: multi_query_recall(KEY, 1, 2, 9, 8), "length=9 must be even"),
        (
            lambda: multi_query_recall(KEY, 1, 2, 8, 5),
            "least 6, got 5",
        ),
        (lambda: multi_query_recall(KEY, 1, 2, 8, 8, power=0.0), "power=0.0"),
        (
            lambda: multi_query_recall(KEY, 1, 2, 8, 8, fillers=-1),
            "fillers must be .*got -1",
        ),
        (lambda: multi_query_recall(KEY, 1, 2, 8, 8, fillers=3), "at least 9"),
    ],
)
def test_bad_sizes_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_multi_query_recall_equals_zoology():
    batch = queries(KEY, 8, 5, 32, 24)
    for tokens, targets, mask in zip(*map(np.asarray, batch[:3]), strict=True):
        names, values = tokens[0:10:2], tokens[1:10:2]
        assert len(set(names)) == len(set(values)) == 5
        assert 1 <= names.min() and names.max() < 12 <= values.min()
        asked = np.flatnonzero(mask)
        assert len(asked) == 5 and asked.min() >= 10 and (asked % 2 == 0).all()
        shown = dict(zip(names, values, strict=True))
        assert sorted(tokens[asked]) == sorted(shown)
        assert [shown[name] for name in tokens[asked]] == targets[asked].tolist()
        assert not targets[mask == 0].any()
    tokens = np.asarray(batch.tokens)
    filler = np.concatenate(
        [row[mask == 0][10:] for row, mask in zip(tokens, batch.mask, strict=True)]
    )
    assert filler.min() < 6 and filler.max() > 18


def test_reserved_filler_repeats_no_key():
    batch = queries(KEY, 8, 5, 64, 32, fillers=8)
    tokens, asked = np.asarray(batch.tokens), np.asarray(batch.mask) > 0
    filler = tokens[:, 10:][~asked[:, 10:]]
    assert filler.min() >= 24 and len(np.unique(filler)) == 8
    assert tokens[:, :10].max() < 24 and tokens[asked].max() < 12


@pytest.mark.slow
def test_queries_come_soon_by_the_power_law():
    """Gaps are numpy's weighted choice without replacement: the same mean."""
    rng = np.random.default_rng(0)
    weights = np.arange(1, 15, dtype=float) ** (0.01 - 1)
    drawn = [
        rng.choice(14, size=2, replace=False, p=weights / weights.sum())
        for _ in range(4000)
    ]
    mask = queries(KEY, 4000, 2, 32, 16).mask
    gaps = (np.nonzero(np.asarray(mask))[1] - 4) / 2
    assert abs(gaps.mean() - np.mean(drawn)) < 0.15
    uniform = queries(KEY, 4000, 2, 32, 16, power=1.0).mask
    gaps = (np.nonzero(np.asarray(uniform))[1] - 4) / 2
    assert abs(gaps.mean() - 6.5) < 0.15
