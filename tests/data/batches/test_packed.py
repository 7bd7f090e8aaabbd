"""Packed rows: every target once, none across documents, aligned starts."""

import collections
import itertools
import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memjax.data import TokenisedDocument, mixed_batches, packed_batches
from memjax.data.batches.packed import best_fit


def _documents(lengths, first=0):
    """Documents whose tokens tell the document and the place: 1000 * d + t + 1."""
    return [
        TokenisedDocument(f"d{d}", "text", np.arange(n, dtype=np.int32) + 1000 * d + 1)
        for d, n in enumerate(lengths, first)
    ]


def _epoch(batches, targets):
    """Batches until so many targets were seen."""
    seen = []
    while sum(int(b.mask.sum()) for b in seen) < targets:
        seen.append(next(batches))
    return seen


@settings(deadline=None, max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=9),
    units=st.integers(1, 6),
    start_multiple=st.sampled_from([1, 3, 4]),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_target_occurs_once_per_epoch(lengths, units, start_multiple, seed):
    documents = _documents(lengths)
    length = units * start_multiple

    def make():
        return packed_batches(documents, length, 1, seed, start_multiple=start_multiple)

    if max(lengths) == 1:
        with pytest.raises(ValueError, match="has two tokens"):
            make()
        return
    batches = make()
    expected = [t for d in documents for t in d.tokens[1:].tolist()]
    for _ in range(2):
        epoch = _epoch(batches, len(expected))
        scored = [b.targets[b.mask > 0] for b in epoch]
        assert sorted(np.concatenate(scored).tolist()) == sorted(expected)
        for batch in epoch:
            tokens, targets, mask, reset = (x[0] for x in batch)
            _check_row(tokens, targets, mask, reset, start_multiple)


def _check_row(tokens, targets, mask, reset, start_multiple):
    counts = mask > 0
    # The target is the document's own next token.
    np.testing.assert_array_equal(targets[counts], tokens[counts] + 1)
    assert not tokens[~counts].any() and not targets[~counts].any()
    assert reset[0] and counts[reset].all()
    assert not (np.flatnonzero(reset) % start_multiple).any()
    # Between two starts there is one document, without a gap before its padding.
    for piece in np.split(np.arange(len(tokens)), np.flatnonzero(reset)[1:]):
        own = tokens[piece][counts[piece]]
        np.testing.assert_array_equal(own, own[0] + np.arange(len(own)))
        assert counts[piece][: len(own)].all()


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=40))
def test_best_fit_equals_a_naive_search(sizes):
    room: list[int] = []
    for size in sorted(sizes, reverse=True):
        fits = [i for i, left in enumerate(room) if left >= size]
        if fits:
            room[min(fits, key=lambda i: room[i])] -= size
        else:
            room.append(20 - size)
    bins, places = best_fit(np.array(sizes), 20)
    filled = collections.defaultdict(list)
    for size, which, place in zip(sizes, bins.tolist(), places.tolist(), strict=True):
        filled[which].append((place, size))
    for content in filled.values():
        ends = np.cumsum([size for _, size in sorted(content)])
        assert [place for place, _ in sorted(content)] == [0, *ends[:-1]]
        assert ends[-1] <= 20
    left = [20 - sum(size for _, size in content) for content in filled.values()]
    assert sorted(left) == sorted(room)


def test_long_document_fills_rows_and_its_remainder_shares_one():
    batches = packed_batches(_documents([20, 4]), 8, 1, seed=0)
    rows = {tuple(next(batches).tokens[0]) for _ in range(3)}
    assert rows == {
        tuple(range(1, 9)),
        tuple(range(9, 17)),
        (17, 18, 19, 1001, 1002, 1003, 0, 0),
    }


def test_the_log_says_how_full_rows_are(caplog):
    with caplog.at_level(logging.INFO, logger="memjax.data.batches.pipeline"):
        packed_batches(_documents([20, 4, 1]), 8, 1, seed=0)
    assert "1 one-token documents left out" in caplog.text
    assert "2 documents in 3 rows of 8 tokens, 91.7% full" in caplog.text


def test_position_with_other_start_multiple_is_refused():
    documents = _documents([20, 4])
    state = packed_batches(documents, 8, 1, seed=0).get_state()
    with pytest.raises(ValueError, match="start_multiple"):
        packed_batches(documents, 8, 1, seed=0, start_multiple=4).set_state(state)


@pytest.mark.parametrize("start_multiple", [0, 3])
def test_rows_that_are_no_multiple_are_refused(start_multiple):
    with pytest.raises(ValueError, match=f"start_multiple={start_multiple}, where"):
        packed_batches(_documents([9]), 8, 1, seed=0, start_multiple=start_multiple)


def test_sources_of_a_mixture_have_their_share_of_the_tokens():
    # Rows of the first are full, those of the second half empty.
    sources = [_documents([9] * 6), _documents([6] * 5, first=6)]
    batches = mixed_batches(sources, [1.0, 1.0], 8, 1, seed=0, start_multiple=4)
    tokens = np.zeros(2)
    for batch in itertools.islice(batches, 260):
        tokens[int(batch.tokens[0, 0] > 6000)] += batch.mask.sum()
    np.testing.assert_allclose(tokens / tokens.sum(), 0.5, atol=0.01)
    assert batches.get_state()["start_multiple"] == 4
