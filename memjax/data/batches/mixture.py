"""Batches of a weighted mixture of sources."""

import math
from collections.abc import Sequence
from numbers import Real

import grain

from memjax.checks import require_all, require_instance
from memjax.data.batches.iterator import BatchIterator, identity
from memjax.data.batches.pipeline import check_rows, chunk_rows, packed_rows
from memjax.data.documents.token_file import TokenisedDocument


def mixed_batches(
    sources: Sequence[Sequence[TokenisedDocument]],
    weights: Sequence[int | float],
    context_length: int,
    batch_size: int,
    seed: int,
    *,
    start_multiple: int | None = None,
    shard_index: int = 0,
    shard_count: int = 1,
    vocab_size: int | None = None,
) -> BatchIterator:
    """Yields the chunks of several sources, each in its share of the tokens.

    Chunks are those of `chunked_batches`, reshuffled in each epoch of their source. The
    source of a chunk follows from its position: among the first n chunks each source
    has its share to within one chunk. With `start_multiple` rows of `packed_batches`
    replace chunks; shares are then of the mean number of tokens in a source's rows.

    Args:
        sources: documents of each.
        weights: shares of the tokens, up to a common factor; positive.
        context_length: T, at least 1.
        batch_size: sequences over all hosts, divisible by shard_count.
        seed: in [0, 2**32).
        start_multiple: as `packed_batches` takes it; None cuts chunks.
        shard_index: this host, in [0, shard_count).
        shard_count: number of hosts.
        vocab_size: if given, every id is checked to be in [0, vocab_size).

    Raises:
        ValueError: an argument is out of its range, or no document of a source is long
            enough.
    """
    check_rows(batch_size, seed, shard_index, shard_count)
    require_instance("sources", sources, Sequence)
    require_all("weights", weights, Real)
    if not sources or len(sources) != len(weights):
        raise ValueError(
            f"weights must be one for each of {len(sources)} sources, got {weights}"
        )
    if not all(0 < weight < math.inf for weight in weights):
        raise ValueError(f"weights must be positive, got {weights}")
    parts, of_rows = [], []
    for i, documents in enumerate(sources):
        weight = weights[i]
        if start_multiple is None:
            source = chunk_rows(documents, context_length, vocab_size)
        else:
            source = packed_rows(documents, context_length, start_multiple, vocab_size)
            # Rows are not equally full: a source with emptier ones has more of them.
            weight = weight * len(source) / source.inputs
        # An order of its own for each source.
        shuffled = grain.MapDataset.source(source).shuffle(seed=(seed + i) % 2**32)
        parts.append(shuffled.repeat())
        of_rows.append(weight)
    rows = grain.MapDataset.mix(parts, of_rows)
    every = [document for documents in sources for document in documents]
    mode = "chunked" if start_multiple is None else "packed"
    made_from = identity(mode, context_length, seed, every)
    if start_multiple is not None:
        made_from["start_multiple"] = start_multiple
    shares = [
        [len(part), weight] for part, weight in zip(sources, weights, strict=True)
    ]
    made_from["mixture"] = shares
    return BatchIterator(rows, batch_size, made_from, shard_index, shard_count)
