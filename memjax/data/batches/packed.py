"""Packing of several documents into one row by best-fit decreasing bin packing.

A document of n tokens has n - 1 inputs. A document longer than a row fills whole rows;
its remainder is packed with those of others, the longest first, each into the fullest
row with enough space. Ding et al. (2024), https://arxiv.org/abs/2404.10830, section
2.2.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from memjax.data.batches.batch import Batch
from memjax.data.documents.tokens import TokenisedDocument


class Pieces(NamedTuple):
    """Contiguous pieces of documents, sorted by row and by position in the row.

    Attributes:
        document: index of the document.
        offset: of the first input in its document.
        inputs: number of inputs.
        place: of the first input in its row.
        ends: for each row, the index after its last piece.
    """

    document: Int64[np.ndarray, " P"]
    offset: Int64[np.ndarray, " P"]
    inputs: Int64[np.ndarray, " P"]
    place: Int64[np.ndarray, " P"]
    ends: Int64[np.ndarray, " R"]


def pack(
    inputs: Int64[np.ndarray, " N"], length: int, start_multiple: int = 1
) -> Pieces:
    """Assigns the documents' inputs to rows, deterministically.

    Args:
        inputs: of each document, its tokens but the last.
        length: T, inputs of a row, a multiple of `start_multiple`.
        start_multiple: pieces begin at multiples of this in a row.
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

    def join(*parts: np.ndarray) -> np.ndarray:
        return np.concatenate(parts).astype(np.int64)

    # Rows of one piece come first.
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
    """The bin of each size and its place in it, by best-fit decreasing.

    Args:
        sizes: at most `capacity`.
        capacity: of a bin.
    """
    bins, places = np.zeros_like(sizes), np.zeros_like(sizes)
    # Bins by their free space; bit s of `spaces` is set where a bin has free space s.
    # Bits are searched in constant time, bins would not be.
    by_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    spaces, opened = 0, 0
    for i in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[i])
        fits = spaces >> size
        if fits:
            space = size + (fits & -fits).bit_length() - 1
            which = by_space[space].pop()
            spaces ^= 0 if by_space[space] else 1 << space
        else:
            space, which, opened = capacity, opened, opened + 1
        bins[i], places[i] = which, capacity - space
        by_space[space - size].append(which)
        spaces |= 1 << (space - size)
    return bins, places


class PackedRows:
    """Rows of packed documents, by index."""

    def __init__(
        self, documents: Sequence[TokenisedDocument], length: int, start_multiple: int
    ):
        self._documents = documents
        self._length = length
        inputs = np.array([max(len(d.tokens) - 1, 0) for d in documents], np.int64)
        self._pieces = pack(inputs, length, start_multiple)
        #: Inputs of all rows, without padding.
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
            # One more token: targets are the inputs shifted by one.
            read = np.asarray(document.tokens[offset : offset + count + 1])
            here = slice(place, place + count)
            tokens[here], targets[here], mask[here] = read[:-1], read[1:], 1.0
            reset[place] = True
        return Batch(tokens, targets, mask, reset)
