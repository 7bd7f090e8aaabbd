"""Random access to the elements of global batches, by index arithmetic."""

import functools
import sys
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32, Int64

from memjax.data.batches.batch import Batch
from memjax.data.documents.record_tokens import RecordTokens
from memjax.data.documents.tokens import TokenisedDocument


@runtime_checkable
class Rows(Protocol):
    """Elements of all global batches: r of step s is at index s * batch_size + r."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> Any: ...


class HostRows:
    """Inverts ElasticIterator's interleaving, for contiguous rows on each host.

    ElasticIterator gives host h the places h, h + shard_count, h + 2 shard_count, ...
    of each global batch; those places hold rows h * R, h * R + 1, h * R + 2, ...
    """

    def __init__(self, rows: Rows, batch_size: int, shard_count: int):
        self._rows = rows
        self._batch_size = batch_size
        self._shard_count = shard_count

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Batch:
        step, place = divmod(int(index), self._batch_size)
        within, host = divmod(place, self._shard_count)
        row = host * (self._batch_size // self._shard_count) + within
        return self._rows[step * self._batch_size + row]


class Chunks:
    """Chunk i over all documents in order."""

    def __init__(
        self,
        documents: Sequence[TokenisedDocument],
        length: int,
        counts: Int64[np.ndarray, " documents"],
    ):
        self._documents = documents
        self._length = length
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Batch:
        which = int(np.searchsorted(self._ends, index, side="right"))
        start = (int(index) - int(self._starts[which])) * self._length
        return _row(self._documents[which].tokens, start, self._length, True)


class Streams:
    """Element step * batch_size + row is segment `step` of stream `row`."""

    def __init__(
        self,
        documents: Sequence[TokenisedDocument],
        length: int,
        batch_size: int,
        seed: int,
    ):
        self._documents = documents
        self._length = length
        self._batch_size = batch_size
        self._seed = seed
        self._counts = np.array([-(-(len(d.tokens) - 1) // length) for d in documents])
        self._per_epoch = int(self._counts.sum())
        # One order for each stream is in use at a time.
        self._plan = functools.lru_cache(maxsize=batch_size)(self._make_plan)

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Batch:
        step, row = divmod(int(index), self._batch_size)
        epoch, offset = divmod(step, self._per_epoch)
        order, ends = self._plan(row, epoch)
        place = int(np.searchsorted(ends, offset, side="right"))
        which = int(order[place])
        segment = offset - int(ends[place] - self._counts[which])
        tokens = self._documents[which].tokens
        return _row(tokens, segment * self._length, self._length, segment == 0)

    def _make_plan(self, row: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        # numpy guarantees that raw bits of a bit generator never change; a saved
        # position must stay valid.
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, row, epoch]))
        order = np.argsort(bits.random_raw(len(self._documents)), kind="stable")
        return order, np.cumsum(self._counts[order])


def _row(
    tokens: Int32[np.ndarray, " n"] | RecordTokens, start: int, length: int, reset: bool
) -> Batch:
    """One row, shapes without B; grain stacks rows into a batch."""
    # One more token: targets are the inputs shifted by one.
    window = np.asarray(tokens[start : start + length + 1])
    count = len(window) - 1
    pad = (0, length - count)
    return Batch(
        tokens=np.pad(window[:-1], pad),
        targets=np.pad(window[1:], pad),
        mask=(np.arange(length) < count).astype(np.float32),
        reset=np.bool_(reset),  # pyright: ignore
    )
