"""Packs several documents into one row: less padding, and none of them cut needlessly.

A document of n tokens has n - 1 inputs. Where they are more than a row, they fill whole
rows, and what remains is packed with the remainders of others: the longest first, each
into the fullest row that has room. Ding et al. (2024),
https://arxiv.org/abs/2404.10830, section 2.2.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from memjax.data.batches.batch import Batch
from memjax.data.documents.tokens import TokenisedDocument


class Pieces(NamedTuple):
    """Runs of documents' inputs, row by row; a row's are in the order of its places.

    Attributes:
        document: which one.
        offset: of the first input in its document.
        inputs: how many.
        place: of the first input in its row.
        ends: of each row, the pieces up to its last.
    """

    document: Int64[np.ndarray, " P"]
    offset: Int64[np.ndarray, " P"]
    inputs: Int64[np.ndarray, " P"]
    place: Int64[np.ndarray, " P"]
    ends: Int64[np.ndarray, " R"]


def pack(
    inputs: Int64[np.ndarray, " N"], length: int, start_multiple: int = 1
) -> Pieces:
    """Which inputs of which document go where; the same for the same arguments.

    Args:
        inputs: of each document, its tokens but the last.
        length: T, inputs of a row, a multiple of `start_multiple`.
        start_multiple: pieces begin at multiples of so many tokens of a row.
    """
    whole, rest = inputs // length, inputs % length
    cut = np.flatnonzero(whole)
    full = np.repeat(cut, whole[cut])
    # The k-th row of a document, counted from the first row of each.
    before = np.cumsum(whole[cut]) - whole[cut]
    k = np.arange(len(full)) - np.repeat(before, whole[cut])
    short = np.flatnonzero(rest)
    units = -(-rest[short] // start_multiple)
    row, place = best_fit(units, length // start_multiple)
    order = np.lexsort((place, row))
    short, rows = short[order], row[order]
    join = lambda *parts: np.concatenate(parts).astype(np.int64)
    # The rows that hold one piece come first.
    packed_ends = len(full) + np.flatnonzero(np.diff(rows, append=-1)) + 1
    return Pieces(
        document=join(full, short),
        offset=join(k * length, whole[short] * length),
        inputs=join(np.full(len(full), length), rest[short]),
        place=join(np.zeros(len(full)), place[order] * start_multiple),
        ends=join(np.arange(len(full)) + 1, packed_ends),
    )


def best_fit(
    sizes: Int64[np.ndarray, " N"], capacity: int
) -> tuple[Int64[np.ndarray, " N"], Int64[np.ndarray, " N"]]:
    """The bin of each size and its place there: decreasing sizes, fullest bin first.

    Args:
        sizes: at most `capacity`.
        capacity: of a bin.
    """
    bins, places = np.zeros_like(sizes), np.zeros_like(sizes)
    # Bins by the room that they have left; bit r of `rooms` says whether any has r.
    # A search of the bits costs next to nothing, where one of all bins would not.
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms, opened = 0, 0
    for i in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[i])
        fits = rooms >> size
        if fits:
            room = size + (fits & -fits).bit_length() - 1
            which = by_room[room].pop()
            rooms ^= 0 if by_room[room] else 1 << room
        else:
            room, which, opened = capacity, opened, opened + 1
        bins[i], places[i] = which, capacity - room
        by_room[room - size].append(which)
        rooms |= 1 << (room - size)
    return bins, places


class PackedRows:
    """Row i of the packed documents."""

    def __init__(
        self,
        documents: Sequence[TokenisedDocument],
        length: int,
        start_multiple: int,
    ):
        self._documents = documents
        self._length = length
        inputs = np.array([max(len(d.tokens) - 1, 0) for d in documents], np.int64)
        self._pieces = pack(inputs, length, start_multiple)
        #: Inputs of all rows together, without padding.
        self.inputs = int(inputs.sum())

    def __len__(self) -> int:
        return len(self._pieces.ends)

    def __getitem__(self, index: int) -> Batch:
        pieces, index = self._pieces, int(index)
        first = int(pieces.ends[index - 1]) if index else 0
        tokens = np.zeros(self._length, np.int32)
        targets = np.zeros(self._length, np.int32)
        mask = np.zeros(self._length, np.float32)
        reset = np.zeros(self._length, bool)
        for piece in range(first, int(pieces.ends[index])):
            offset, count, place = (int(x[piece]) for x in pieces[1:4])
            document = self._documents[int(pieces.document[piece])]
            # One token over: inputs and targets are the same tokens, shifted by one.
            read = np.asarray(document.tokens[offset : offset + count + 1])
            here = slice(place, place + count)
            tokens[here], targets[here], mask[here] = read[:-1], read[1:], 1.0
            reset[place] = True
        return Batch(tokens, targets, mask, reset)
