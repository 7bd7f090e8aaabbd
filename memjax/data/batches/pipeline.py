"""Endless, deterministic batches of tokenised documents, on any number of hosts.

All pipelines are random access: batch element r of step s follows from the documents
and the seed by index arithmetic.
"""

import logging
from collections.abc import Sequence

import grain
import numpy as np
from jaxtyping import Int64

from memjax.checks import check_numbers, check_seed, check_sizes, require_all
from memjax.data.batches.iterator import BatchIterator, identity
from memjax.data.batches.packed import PackedRows
from memjax.data.batches.rows import Chunks, Streams
from memjax.data.documents.record_tokens import RecordTokens
from memjax.data.documents.token_file import TokenisedDocument

_LOG = logging.getLogger(__name__)


def chunked_batches(
    documents: Sequence[TokenisedDocument],
    context_length: int,
    batch_size: int,
    seed: int,
    *,
    shard_index: int = 0,
    shard_count: int = 1,
    vocab_size: int | None = None,
) -> BatchIterator:
    """Yields independent chunks of long documents, as the Elastic Memory paper does.

    A document of n tokens gives (n - 1) // context_length chunks: non-overlapping runs
    of exactly context_length inputs, with the next token as the last target. Trailing
    tokens, and documents not longer than context_length, are left out (the log counts
    them, and warns of documents). Chunks are reshuffled each epoch; a batch may have
    the end of one epoch and the start of the next. `mask` is all 1, `reset` all True.

    Args:
        documents: from `load_tokens`.
        context_length: T, at least 1.
        batch_size: sequences over all hosts, divisible by shard_count.
        seed: in [0, 2**32).
        shard_index: this host, in [0, shard_count).
        shard_count: number of hosts.
        vocab_size: if given, every id is checked to be in [0, vocab_size).

    Raises:
        ValueError: an argument is out of its range, or no document is long enough.
    """
    check_rows(batch_size, seed, shard_index, shard_count)
    chunks = chunk_rows(documents, context_length, vocab_size)
    rows = grain.MapDataset.source(chunks).shuffle(seed=seed).repeat()
    made_from = identity("chunked", context_length, seed, documents)
    return BatchIterator(rows, batch_size, made_from, shard_index, shard_count)


def packed_batches(
    documents: Sequence[TokenisedDocument],
    context_length: int,
    batch_size: int,
    seed: int,
    *,
    start_multiple: int = 1,
    shard_index: int = 0,
    shard_count: int = 1,
    vocab_size: int | None = None,
) -> BatchIterator:
    """Yields rows of several documents, for documents of any length.

    A document of n tokens has n - 1 inputs and targets, all read once an epoch: a long
    one fills whole rows, and its remainder shares a row with others. The packing is
    fixed; rows are reshuffled each epoch. `reset` is [B, T], True at the first token of
    each document, or of each part of one that is longer than a row. `mask` is 0 at
    padding. Documents of one token have no target and are left out. The log says how
    full the rows are.

    Args:
        documents: from `load_tokens`.
        context_length: T, a multiple of start_multiple.
        batch_size: rows over all hosts, divisible by shard_count.
        seed: in [0, 2**32).
        start_multiple: documents begin at multiples of this, at least 1; see
            `memjax.models.start_multiple` for that of a model.
        shard_index: this host, in [0, shard_count).
        shard_count: number of hosts.
        vocab_size: if given, every id is checked to be in [0, vocab_size).

    Raises:
        ValueError: an argument is out of its range, or no document has two tokens.
    """
    check_rows(batch_size, seed, shard_index, shard_count)
    packed = packed_rows(documents, context_length, start_multiple, vocab_size)
    rows = grain.MapDataset.source(packed).shuffle(seed=seed).repeat()
    made_from = identity("packed", context_length, seed, documents)
    made_from["start_multiple"] = start_multiple
    return BatchIterator(rows, batch_size, made_from, shard_index, shard_count)


def chunk_rows(
    documents: Sequence[TokenisedDocument], context_length: int, vocab_size: int | None
) -> Chunks:
    """All chunks of the documents; the log counts the tokens left out."""
    _check_documents(documents, vocab_size)
    counts = _chunk_counts(documents, context_length, "context_length")
    left_out = sum(
        len(d.tokens) if n == 0 else len(d.tokens) - 1 - n * context_length
        for d, n in zip(documents, counts.tolist(), strict=True)
    )
    _LOG.info("%d chunks; %d tokens left out", counts.sum(), left_out)
    if short := int((counts == 0).sum()):
        # A warning is shown: a run may train on far less than its folder.
        _LOG.warning(
            "%d of %d documents are left out: they have at most context_length=%d "
            "tokens (modes 'packed' and 'streamed' read them)",
            short,
            len(documents),
            context_length,
        )
    return Chunks(documents, context_length, counts)


def packed_rows(
    documents: Sequence[TokenisedDocument],
    context_length: int,
    start_multiple: int,
    vocab_size: int | None,
) -> PackedRows:
    """The rows of the documents; the log says how full they are."""
    _check_documents(documents, vocab_size)
    check_numbers(start_multiple=start_multiple, context_length=context_length)
    if start_multiple < 1 or context_length < 1 or context_length % start_multiple:
        raise ValueError(
            f"context_length={context_length} must be a positive multiple of "
            f"start_multiple={start_multiple}, where documents may begin"
        )
    usable = _with_targets(documents)
    rows = PackedRows(usable, context_length, start_multiple)
    _LOG.info(
        "%d documents in %d rows of %d tokens, %.1f%% full",
        len(usable),
        len(rows),
        context_length,
        100 * rows.inputs / (len(rows) * context_length),
    )
    return rows


def _with_targets(documents: Sequence[TokenisedDocument]) -> list[TokenisedDocument]:
    """Documents of two tokens or more; the log counts the others."""
    usable = [d for d in documents if len(d.tokens) > 1]
    if not usable:
        raise ValueError(f"none of the {len(documents)} documents has two tokens")
    if len(usable) < len(documents):
        _LOG.info("%d one-token documents left out", len(documents) - len(usable))
    return usable


def streamed_batches(
    documents: Sequence[TokenisedDocument],
    segment_length: int,
    batch_size: int,
    seed: int,
    *,
    shard_index: int = 0,
    shard_count: int = 1,
    vocab_size: int | None = None,
) -> BatchIterator:
    """Yields consecutive segments; each batch element streams whole documents.

    Each batch element reads all documents once per epoch, in an order of its own, each
    document in consecutive segments. A document of n tokens has n - 1 inputs and
    targets; its last segment is padded with id 0 under mask 0. `reset` is True exactly
    at a document's first segment. Documents of one token have no target and are left
    out (the log counts them).

    Args:
        documents: from `load_tokens`.
        segment_length: T, at least 1.
        batch_size: sequences over all hosts, divisible by shard_count.
        seed: in [0, 2**32).
        shard_index: this host, in [0, shard_count).
        shard_count: number of hosts.
        vocab_size: if given, every id is checked to be in [0, vocab_size).

    Raises:
        ValueError: an argument is out of its range, or no document has two tokens.
    """
    check_rows(batch_size, seed, shard_index, shard_count)
    _check_documents(documents, vocab_size)
    check_numbers(segment_length=segment_length)
    if segment_length < 1:
        raise ValueError(f"segment_length={segment_length} must be at least 1")
    usable = _with_targets(documents)
    rows = Streams(usable, segment_length, batch_size, seed)
    made_from = identity("streamed", segment_length, seed, documents)
    return BatchIterator(rows, batch_size, made_from, shard_index, shard_count)


def _chunk_counts(
    documents: Sequence[TokenisedDocument], length: int, argument: str
) -> Int64[np.ndarray, " documents"]:
    check_numbers(**{argument: length})
    if length < 1:
        raise ValueError(f"{argument}={length} must be at least 1")
    counts = np.array([(len(d.tokens) - 1) // length for d in documents], np.int64)
    if counts.sum() < 1:
        longest = max(documents, key=lambda d: len(d.tokens))
        raise ValueError(
            f"no document is longer than {argument}={length}: the longest, "
            f"{longest.name!r}, has {len(longest.tokens)} tokens (--data.join makes "
            "documents of rows)"
        )
    return counts


def check_rows(batch_size: int, seed: int, shard_index: int, shard_count: int) -> None:
    """Raises ValueError on a batch, a seed or a host out of range."""
    check_sizes(batch_size=batch_size, shard_count=shard_count)
    check_sizes(least=0, shard_index=shard_index)
    check_seed(seed)
    if not 0 <= shard_index < shard_count:
        raise ValueError(
            f"shard_index={shard_index} must be in [0, shard_count={shard_count})"
        )
    if batch_size % shard_count:
        raise ValueError(
            f"batch_size={batch_size} must be a multiple of shard_count={shard_count}"
        )


def _check_prepared(name: str, tokens: RecordTokens, vocab_size: int) -> None:
    # Every id was checked against this size when it was written.
    if tokens.vocab_size > vocab_size:
        raise ValueError(
            f"document {name!r} was prepared with a tokenizer of {tokens.vocab_size} "
            f"ids; vocab_size={vocab_size} allows [0, {vocab_size})"
        )


def _check_documents(
    documents: Sequence[TokenisedDocument], vocab_size: int | None
) -> None:
    require_all("documents", documents, TokenisedDocument)
    if not documents:
        raise ValueError("documents is empty; give at least one")
    for document in documents:
        tokens = document.tokens
        if tokens.dtype != np.int32 or tokens.ndim != 1:
            raise ValueError(
                f"document {document.name!r} has tokens of {tokens.dtype} and shape "
                f"{tokens.shape}; they must be int32 [T]"
            )
        if vocab_size is None or not tokens.size:
            continue
        if isinstance(tokens, RecordTokens):
            _check_prepared(document.name, tokens, vocab_size)
            continue
        # As unsigned numbers, negative ids are the largest: one pass over the tokens.
        if tokens.view(np.uint32).max() >= vocab_size:
            raise ValueError(
                f"document {document.name!r} has ids from {tokens.min()} to "
                f"{tokens.max()}; vocab_size={vocab_size} allows [0, {vocab_size})"
            )
