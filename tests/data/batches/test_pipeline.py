"""Batches: exact, endless, restorable, equal on any number of hosts."""

import itertools
import json
import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memjax.data import (
    Batch,
    TokenisedDocument,
    chunked_batches,
    mixed_batches,
    packed_batches,
    streamed_batches,
)
from memjax.data.batches.repeated import RepeatedBatches

ORDER_OF_SEED_7 = {
    "streamed": [[6, 1], [3, 3], [4, 2], [0, 7], [2, 4], [7, 5], [5, 0], [1, 6]],
    "chunked": [[4, 0], [3, 7], [2, 5], [6, 1], [5, 3], [6, 7], [4, 1], [0, 2]],
    "packed": [[4, 0], [3, 7], [2, 5], [6, 1], [5, 3], [6, 7], [4, 1], [0, 2]],
}
PIPELINES = {
    "chunked": chunked_batches,
    "packed": packed_batches,
    "streamed": streamed_batches,
}


def _documents(*lengths):
    """Documents whose tokens tell the document and the place: 1000 * d + t + 1."""
    return [
        TokenisedDocument(f"d{d}", "text", np.arange(n, dtype=np.int32) + 1000 * d + 1)
        for d, n in enumerate(lengths)
    ]


def _take(iterator, count):
    return list(itertools.islice(iterator, count))


def _assert_same(left: Batch, right: Batch):
    for name, a, b in zip(Batch._fields, left, right, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize("make", PIPELINES.values(), ids=PIPELINES)
def test_shapes_and_dtypes(make):
    batch = next(make(_documents(50, 9), 8, 4, seed=0))
    assert isinstance(batch, Batch)
    reset = (4, 8) if make is packed_batches else (4,)
    assert [a.shape for a in batch] == [(4, 8), (4, 8), (4, 8), reset]
    assert [a.dtype for a in batch] == [np.int32, np.int32, np.float32, np.bool_]


@settings(deadline=None, max_examples=12)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    context=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_chunks_equal_those_of_a_naive_loop(lengths, context, seed):
    documents = _documents(*lengths)
    expected = []
    for document in documents:
        start = 0
        while start + context + 1 <= len(document.tokens):
            expected.append(tuple(document.tokens[start : start + context + 1]))
            start += context
    if not expected:
        with pytest.raises(ValueError, match="no document is longer than"):
            chunked_batches(documents, context, 1, seed)
        return
    batches = chunked_batches(documents, context, 1, seed)
    for _ in range(2):
        epoch = _take(batches, len(expected))
        found = [(*b.tokens[0], b.targets[0, -1]) for b in epoch]
        assert sorted(found) == sorted(expected)
        for batch in epoch:
            np.testing.assert_array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])
            assert batch.mask.all() and batch.reset.all()


def test_chunks_are_shuffled_anew_each_epoch_and_by_seed():
    documents = _documents(101)

    def order(iterator):
        return [int(b.tokens[0, 0]) for b in _take(iterator, 20)]

    first = chunked_batches(documents, 5, 1, seed=3)
    one, two = order(first), order(first)
    assert sorted(one) == sorted(two) and one != two and one != sorted(one)
    assert order(chunked_batches(documents, 5, 1, seed=3)) == one
    assert order(chunked_batches(documents, 5, 1, seed=9)) != one


def test_left_out_tokens_are_logged(caplog):
    with caplog.at_level(logging.INFO, logger="memjax.data.batches.pipeline"):
        chunked_batches(_documents(23, 4), 10, 1, seed=0)
        streamed_batches(_documents(23, 1), 10, 1, seed=0)
    # 23 tokens: two chunks use 21. 4 tokens: too short.
    assert "2 chunks; 6 tokens left out" in caplog.text
    assert "1 one-token documents left out" in caplog.text


def _read_rows(batches, rows):
    """Rebuilds, per row, the documents that its stream held (the last is cut)."""
    read = [[] for _ in range(rows)]
    for batch in batches:
        for row in range(rows):
            if batch.reset[row]:
                read[row].append([int(batch.tokens[row, 0])])
            read[row][-1] += batch.targets[row][batch.mask[row] == 1].tolist()
    return read


@settings(deadline=None, max_examples=20)
@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=5),
    segment=st.integers(1, 16),
    rows=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_streams_hold_whole_documents(lengths, segment, rows, seed):
    documents = _documents(*lengths)
    per_epoch = sum(-(-(n - 1) // segment) for n in lengths)
    batches = _take(streamed_batches(documents, segment, rows, seed), 2 * per_epoch)
    whole = sorted(np.asarray(d.tokens).tolist() for d in documents)
    for read in _read_rows(batches, rows):
        epochs = read[: len(documents)], read[len(documents) :]
        assert all(sorted(epoch) == whole for epoch in epochs)


def test_segments_follow_each_other_and_end_in_padding():
    batches = _take(streamed_batches(_documents(12), 4, 1, seed=0), 4)
    assert [b.reset.tolist() for b in batches] == [[True], [False], [False], [True]]
    assert [b.tokens[0].tolist() for b in batches[:3]] == [
        [1, 2, 3, 4],
        [5, 6, 7, 8],
        [9, 10, 11, 0],
    ]
    assert batches[2].targets[0].tolist() == [10, 11, 12, 0]
    assert batches[2].mask[0].tolist() == [1, 1, 1, 0]


def test_last_segment_that_fits_has_no_padding():
    batches = _take(streamed_batches(_documents(9), 4, 1, seed=0), 3)
    assert all(batch.mask.all() for batch in batches)
    assert [bool(b.reset[0]) for b in batches] == [True, False, True]


def test_rows_and_epochs_have_orders_of_their_own():
    documents = _documents(*[3] * 30)
    batches = _take(streamed_batches(documents, 2, 2, seed=0), 60)
    starts = np.array([b.tokens[:, 0] for b in batches])
    orders = {tuple(starts[e : e + 30, row]) for e in (0, 30) for row in (0, 1)}
    assert len(orders) == 4
    other = _take(streamed_batches(documents, 2, 2, seed=1), 30)
    assert [b.tokens[0, 0] for b in other] != starts[:30, 0].tolist()


@pytest.mark.parametrize("mode", PIPELINES)
def test_saved_positions_never_change(mode):
    """A change here breaks the resumption of every run saved before it."""
    batches = _take(PIPELINES[mode](_documents(*[3] * 8), 2, 2, seed=7), 8)
    order = [(b.tokens[:, 0] // 1000).tolist() for b in batches]
    assert order == ORDER_OF_SEED_7[mode]


@pytest.mark.parametrize("make", PIPELINES.values(), ids=PIPELINES)
def test_random_access_equals_iteration(make):
    documents = _documents(50, 33, 7)
    batches = _take(make(documents, 8, 4, seed=5), 30)
    jumping = make(documents, 8, 4, seed=5)
    for step in (29, 0, 13, 14, 7):
        jumping.set_state({**jumping.get_state(), "step": step})
        _assert_same(next(jumping), batches[step])
        assert jumping.get_state()["step"] == step + 1


def _join(shards):
    return Batch(*(np.concatenate(arrays) for arrays in zip(*shards, strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize("shard_count", [2, 8])
@pytest.mark.parametrize("make", PIPELINES.values(), ids=PIPELINES)
def test_hosts_hold_contiguous_rows_of_one_global_batch(make, shard_count):
    documents = _documents(50, 33, 7)
    whole = make(documents, 4, 8, seed=5)
    shards = [
        make(documents, 4, 8, seed=5, shard_index=i, shard_count=shard_count)
        for i in range(shard_count)
    ]
    for _ in range(10):
        _assert_same(_join([next(shard) for shard in shards]), next(whole))
    assert all(shard.get_state() == whole.get_state() for shard in shards)


@pytest.mark.parametrize("shard_count", [1, 4])
@pytest.mark.parametrize("make", PIPELINES.values(), ids=PIPELINES)
def test_a_state_of_two_hosts_restores_on_any_number(make, shard_count):
    documents = _documents(50, 33, 7)

    def hosts(count):
        return [
            make(documents, 4, 8, seed=5, shard_index=i, shard_count=count)
            for i in range(count)
        ]

    before = hosts(2)
    for _ in range(11):
        for host in before:
            next(host)
    state = json.loads(json.dumps(before[1].get_state()))
    after = hosts(shard_count)
    for host in after:
        next(host)
        host.set_state(state)
    for _ in range(5):
        _assert_same(_join([next(h) for h in after]), _join([next(h) for h in before]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": -1}, r"state\['step'\]=-1"),
        ({"step": 1.5}, r"state\['step'\]=1.5"),
        ({"step": None}, r"state\['step'\]=None"),
        ({"seed": 1}, r"state\['seed'\]=1 .* this one has 0"),
        ({"length": 9}, r"state\['length'\]=9"),
        ({"batch_size": 6}, r"state\['batch_size'\]=6"),
        ({"mode": "chunked"}, r"state\['mode'\]='chunked'"),
        ({"documents": "other"}, r"state\['documents'\]='other'"),
    ],
)
def test_a_foreign_state_is_refused(change, message):
    iterator = streamed_batches(_documents(20), 4, 2, seed=0)
    next(iterator)
    state = iterator.get_state()
    with pytest.raises(ValueError, match=message):
        iterator.set_state({**state, **change})
    assert iterator.get_state() == state


def test_other_documents_give_another_state():
    state = streamed_batches(_documents(20), 4, 2, seed=0).get_state()
    with pytest.raises(ValueError, match="documents"):
        streamed_batches(_documents(21), 4, 2, seed=0).set_state(state)


def test_other_tokens_of_the_same_documents_give_another_state():
    (document,) = _documents(20)
    state = streamed_batches([document], 4, 2, seed=0).get_state()
    other = document._replace(tokens=document.tokens[::-1].copy())
    with pytest.raises(ValueError, match="state\\['content'\\]"):
        streamed_batches([other], 4, 2, seed=0).set_state(state)
    # States of earlier versions lack it.
    del state["content"]
    streamed_batches([other], 4, 2, seed=0).set_state(state)


@pytest.mark.parametrize("make", PIPELINES.values(), ids=PIPELINES)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 5, "shard_count": 2}, "batch_size=5 .*shard_count=2"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"shard_index": 2, "shard_count": 2}, "shard_index=2"),
        ({"shard_index": -1}, "shard_index must be .*, got -1"),
        ({"shard_count": 0}, "shard_count must be .*, got 0"),
        ({"seed": -1}, "seed must be .*, got -1"),
        ({"seed": 2**32}, "seed must be .*, got 4294967296"),
        ({"documents": []}, "documents is empty"),
        ({"vocab_size": 20}, r"'d0' has ids from 1 to 21; vocab_size=20"),
    ],
)
def test_bad_arguments_are_refused(make, arguments, message):
    good = {"documents": _documents(21), "batch_size": 4, "seed": 0}
    length = "segment_length" if make is streamed_batches else "context_length"
    make(**good, **{length: 4}, vocab_size=22)
    with pytest.raises(ValueError, match=message):
        make(**{**good, length: 4, **arguments})
    with pytest.raises(ValueError, match=f"{length}=0"):
        make(**good, **{length: 0})


def test_negative_ids_are_refused():
    documents = [TokenisedDocument("odd", "text", np.array([3, -1, 2], np.int32))]
    with pytest.raises(ValueError, match="'odd' has ids from -1"):
        streamed_batches(documents, 2, 1, seed=0, vocab_size=10)


def test_tokens_of_another_dtype_are_refused():
    documents = [TokenisedDocument("wide", "text", np.arange(9))]  # pyright: ignore
    with pytest.raises(ValueError, match="'wide' has tokens of int64"):
        streamed_batches(documents, 2, 1, seed=0)


def test_documents_that_are_too_short_are_named():
    documents = _documents(9, 10)
    with pytest.raises(
        ValueError, match="context_length=10: the longest, 'd1', has 10"
    ):
        chunked_batches(documents, 10, 1, seed=0)
    assert next(chunked_batches(documents, 9, 1, seed=0)).targets[0, -1] == 1010
    with pytest.raises(ValueError, match="none of the 2 documents has two tokens"):
        streamed_batches(_documents(1, 1), 10, 1, seed=0)


def test_documents_that_are_too_short_are_counted_in_a_warning(caplog):
    """A warning is shown without any setting of logging."""
    chunked_batches(_documents(3, 9, 2), 4, 1, 0)
    assert "2 of 3 documents are left out" in caplog.text
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_repeated_batches_resume():
    def make():
        return chunked_batches(_documents(90), 8, 2, seed=1)

    repeated = RepeatedBatches(make(), 3)
    first = _take(make(), 3)
    for _, expected in zip(range(8), first * 3, strict=False):
        _assert_same(next(repeated), expected)
    state = json.loads(json.dumps(repeated.get_state()))
    other = RepeatedBatches(make(), 3)
    other.set_state(state)
    assert state["step"] == 8 and other.get_state() == state
    _assert_same(next(other), first[2])
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        RepeatedBatches(make(), 0)
    with pytest.raises(ValueError, match="seed"):
        RepeatedBatches(chunked_batches(_documents(90), 8, 2, seed=2), 3).set_state(
            state
        )


def _sources(*lengths):
    """Documents of sources that tell by their tokens which one they are of."""
    return [
        [
            d._replace(tokens=np.asarray(d.tokens) + 100_000 * i)
            for d in _documents(*of_source)
        ]
        for i, of_source in enumerate(lengths)
    ]


def _source_of(batch):
    return batch.tokens[:, 0] // 100_000


@settings(deadline=None, max_examples=4)
@given(
    weights=st.lists(st.floats(0.1, 10), min_size=2, max_size=4),
    batch_size=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_prefix_has_the_shares_of_the_sources(weights, batch_size, seed):
    sources = _sources(*[(9, 40 + 20 * i) for i in range(len(weights))])
    batches = _take(mixed_batches(sources, weights, 4, batch_size, seed), 40)
    which = np.concatenate([_source_of(batch) for batch in batches])
    for i, weight in enumerate(weights):
        expected = weight / sum(weights) * np.arange(1, len(which) + 1)
        assert np.abs(np.cumsum(which == i) - expected).max() <= len(weights)


def test_a_mixture_reads_all_chunks_of_a_source_once_an_epoch():
    sources = _sources((9, 17), (41,))
    batches = mixed_batches(sources, [1, 1], 4, 1, seed=3)
    chunks = [tuple(b.tokens[0]) for b in _take(batches, 24) if _source_of(b) == 0]
    assert len(chunks) == 12 and len(set(chunks)) == len(set(chunks[:6])) == 6
    assert chunks[:6] != chunks[6:]


def test_mixture_resumes_on_another_number_of_hosts():
    sources, weights = _sources((50, 9), (80,)), [3.0, 1.0]

    def make(**shard):
        return mixed_batches(sources, weights, 4, 4, seed=1, **shard)

    whole = make()
    before = _take(whole, 5)
    state = json.loads(json.dumps(whole.get_state()))
    rest = _take(whole, 5)
    hosts = [make(shard_index=i, shard_count=2) for i in range(2)]
    for host in hosts:
        host.set_state(state)
    for expected in rest:
        parts = [next(host) for host in hosts]
        _assert_same(Batch(*map(np.concatenate, zip(*parts, strict=True))), expected)
    assert not np.array_equal(before[0].tokens, rest[0].tokens)
    other = mixed_batches(sources, [1.0, 1.0], 4, 4, seed=1)
    with pytest.raises(ValueError, match="mixture"):
        other.set_state(state)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], "weights must be one for each of 2 sources"),
        ([1.0, 0.0], "weights must be positive"),
        ([1.0, float("nan")], "weights must be positive"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        mixed_batches(_sources((9,), (9,)), weights, 4, 1, 0)


def test_a_source_without_a_chunk_is_refused():
    with pytest.raises(ValueError, match="no document is longer than context_length=8"):
        mixed_batches(_sources((9,), (8,)), [1.0, 1.0], 8, 1, 0)
