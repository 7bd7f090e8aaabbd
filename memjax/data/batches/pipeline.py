"""Endless, deterministic batches of tokenised documents, on any number of hosts.

Both pipelines are random access: what batch element r holds at step s follows from the
documents and the seed by index arithmetic. There is one global batch, which does not
depend on the number of hosts. A host reads its contiguous elements
[shard_index * R, (shard_index + 1) * R), R = batch_size / shard_count. So a saved
position can be restored on another number of hosts, and batch element r carries the
same stream before and after.
"""

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import grain
import numpy as np
from jaxtyping import Int64

from memjax.data.batches.batch import Batch
from memjax.data.batches.rows import Chunks, HostRows, Rows, Streams
from memjax.data.documents.token_file import TokenisedDocument, content_digest

_LOG = logging.getLogger(__name__)


class BatchIterator:
    """Yields this host's part of each batch, B = batch_size / shard_count, for ever."""

    def __init__(
        self,
        rows: Rows,
        batch_size: int,
        identity: Mapping[str, Any],
        shard_index: int,
        shard_count: int,
    ):
        self._batch_size = batch_size
        self._identity = {**identity, "batch_size": batch_size}
        ordered = grain.MapDataset.source(HostRows(rows, batch_size, shard_count))
        elastic = grain.experimental.ElasticIterator(
            ordered,
            batch_size,
            grain.sharding.ShardOptions(shard_index, shard_count),
            # Tokens are memory-mapped: threads would only contend for the GIL.
            read_options=grain.ReadOptions(num_threads=0, prefetch_buffer_size=0),
        )
        self._iterator = iter(elastic)

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Returns the position, the same on every host, ready for JSON."""
        index = self._iterator.get_state()["global_next_index"]
        return {"step": index // self._batch_size, **self._identity}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to a position that `get_state` gave, on any number of hosts.

        Raises:
            ValueError: the state is malformed, or comes from other documents, other
                tokens of them ("content"), lengths, batch size or seed (the message
                says which).
        """
        step = state.get("step")
        if type(step) is not int or step < 0:
            raise ValueError(f"state['step']={step!r} must be an integer >= 0")
        # A position means something for the same documents, lengths and seed alone.
        # Earlier versions did not write down the content.
        for key, value in self._identity.items():
            if state.get(key, value if key == "content" else None) != value:
                raise ValueError(
                    f"state[{key!r}]={state.get(key)!r} belongs to another pipeline: "
                    f"this one has {value!r}"
                )
        self._iterator.set_state({"global_next_index": step * self._batch_size})


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

    A document of n tokens gives (n - 1) // context_length chunks: inputs are
    non-overlapping runs of exactly context_length tokens, and a chunk's last target is
    the token after its last input. Trailing tokens that fill no chunk, and documents
    not longer than context_length, are left out (the log says how many, and warns of
    documents). Chunks are
    shuffled anew each epoch; a batch may hold the end of one epoch and the start of
    the next. `mask` is all 1, `reset` all True.

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
    _check_rows(batch_size, seed, shard_index, shard_count)
    chunks = _chunks(documents, context_length, vocab_size)
    rows = grain.MapDataset.source(chunks).shuffle(seed=seed).repeat()
    identity = _identity("chunked", context_length, seed, documents)
    return BatchIterator(rows, batch_size, identity, shard_index, shard_count)


def mixed_batches(
    sources: Sequence[Sequence[TokenisedDocument]],
    weights: Sequence[int | float],
    context_length: int,
    batch_size: int,
    seed: int,
    *,
    shard_index: int = 0,
    shard_count: int = 1,
    vocab_size: int | None = None,
) -> BatchIterator:
    """Yields the chunks of several sources, each in its share of the tokens.

    Chunks are those of `chunked_batches`, shuffled anew in each epoch of their own
    source. Which source a chunk is from follows from its position alone: among the
    first n chunks each source has its share, but for less than one chunk a source.

    Args:
        sources: documents of each.
        weights: shares of the tokens, up to a common factor; positive.
        context_length: T, at least 1.
        batch_size: sequences over all hosts, divisible by shard_count.
        seed: in [0, 2**32).
        shard_index: this host, in [0, shard_count).
        shard_count: number of hosts.
        vocab_size: if given, every id is checked to be in [0, vocab_size).

    Raises:
        ValueError: an argument is out of its range, or no document of a source is long
            enough.
    """
    _check_rows(batch_size, seed, shard_index, shard_count)
    if not sources or len(sources) != len(weights):
        raise ValueError(
            f"weights must be one for each of {len(sources)} sources, got {weights}"
        )
    if not all(0 < weight < math.inf for weight in weights):
        raise ValueError(f"weights must be positive, got {weights}")
    parts = []
    for i, documents in enumerate(sources):
        chunks = _chunks(documents, context_length, vocab_size)
        # Each in an order of its own.
        shuffled = grain.MapDataset.source(chunks).shuffle(seed=(seed + i) % 2**32)
        parts.append(shuffled.repeat())
    rows = grain.MapDataset.mix(parts, list(weights))
    every = [document for documents in sources for document in documents]
    identity = _identity("chunked", context_length, seed, every)
    shares = [
        [len(part), weight] for part, weight in zip(sources, weights, strict=True)
    ]
    identity["mixture"] = shares
    return BatchIterator(rows, batch_size, identity, shard_index, shard_count)


def _chunks(
    documents: Sequence[TokenisedDocument], context_length: int, vocab_size: int | None
) -> Chunks:
    """All chunks of the documents; the log says what is left out."""
    _check_documents(documents, vocab_size)
    counts = _chunk_counts(documents, context_length, "context_length")
    left_out = sum(
        len(d.tokens) if n == 0 else len(d.tokens) - 1 - n * context_length
        for d, n in zip(documents, counts.tolist(), strict=True)
    )
    _LOG.info("%d chunks; %d tokens left out", counts.sum(), left_out)
    if short := int((counts == 0).sum()):
        # A warning, as it is shown: a run may learn from far less than its folder.
        _LOG.warning(
            "%d of %d documents are left out: they have at most context_length=%d "
            "tokens (mode 'streamed' reads them)",
            short,
            len(documents),
            context_length,
        )
    return Chunks(documents, context_length, counts)


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
    out (the log says how many).

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
    _check_rows(batch_size, seed, shard_index, shard_count)
    _check_documents(documents, vocab_size)
    if segment_length < 1:
        raise ValueError(f"segment_length={segment_length} must be at least 1")
    usable = [d for d in documents if len(d.tokens) > 1]
    if not usable:
        raise ValueError(f"none of the {len(documents)} documents has two tokens")
    if len(usable) < len(documents):
        _LOG.info("%d one-token documents left out", len(documents) - len(usable))
    rows = Streams(usable, segment_length, batch_size, seed)
    identity = _identity("streamed", segment_length, seed, documents)
    return BatchIterator(rows, batch_size, identity, shard_index, shard_count)


def _chunk_counts(
    documents: Sequence[TokenisedDocument], length: int, argument: str
) -> Int64[np.ndarray, " documents"]:
    if length < 1:
        raise ValueError(f"{argument}={length} must be at least 1")
    counts = np.array([(len(d.tokens) - 1) // length for d in documents], np.int64)
    if counts.sum() < 1:
        longest = max(documents, key=lambda d: len(d.tokens))
        raise ValueError(
            f"no document is longer than {argument}={length}: the longest, "
            f"{longest.name!r}, has {len(longest.tokens)} tokens"
        )
    return counts


def _check_rows(batch_size: int, seed: int, shard_index: int, shard_count: int) -> None:
    if shard_count < 1 or not 0 <= shard_index < shard_count:
        raise ValueError(
            f"shard_index={shard_index} must be in [0, shard_count={shard_count})"
        )
    if batch_size < 1 or batch_size % shard_count:
        raise ValueError(
            f"batch_size={batch_size} must be a positive multiple of "
            f"shard_count={shard_count}"
        )
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} must be in [0, 2**32)")


def _check_documents(
    documents: Sequence[TokenisedDocument], vocab_size: int | None
) -> None:
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
        # As unsigned numbers, negative ids are the largest: one pass over the tokens.
        if tokens.view(np.uint32).max() >= vocab_size:
            raise ValueError(
                f"document {document.name!r} has ids from {tokens.min()} to "
                f"{tokens.max()}; vocab_size={vocab_size} allows [0, {vocab_size})"
            )


def _identity(
    mode: str, length: int, seed: int, documents: Sequence[TokenisedDocument]
) -> dict[str, Any]:
    digest = hashlib.sha256(
        repr([(d.name, len(d.tokens)) for d in documents]).encode("utf-8")
    )
    return {
        "mode": mode,
        "length": length,
        "seed": seed,
        "documents": digest.hexdigest()[:16],
        "content": content_digest(documents),
    }
