"""Sizes of the TPU kernels' programs, in one table.

They are for a v5e: `python -m experiments.tpu.sweep` counts the cycles of each one's
neighbours, there and on a v6e. Other chips have the same: a program is traced before it
is known which chip it is lowered for.
"""

from typing import NamedTuple


class Packed(NamedTuple):
    """A program of packed heads, at the most; see `layout.plan`.

    One pack hides the latency of another. A program takes as many packs of a batch
    element as there are and fit, then chunks, then batch elements.

    Attributes:
        memories: float32 values of one head that the backward kernel holds, in copies
            of its memory.
        token: likewise for each token, in channels of keys, values and slots.
        pairs: likewise, for each pair of tokens of a chunk.
        packs: of a batch element.
        chunks: of a block.
        rows: batch elements.
        tokens: of all packs, chunks and batch elements, each of its own.
        in_step: packs that go through a chunk's phases in step. A few alone wait for
            their products.
        whole_rows: whether all packs of a batch element do.
        lags: phases by which packs are behind those before them: forward, backward, and
            backward where chunks of a block were written again before.
        saved_tokens: a chunk of fewer saves the memories before its block alone: those
            before each chunk would be more than its tokens.
        group_bytes: VMEM of the packs of a batch element, by estimate.
        bytes: of all, of which Mosaic takes about half for Trellis.
    """

    memories: int
    token: tuple[int, ...]
    pairs: int = 4
    packs: int = 8
    chunks: int = 1
    rows: int = 8
    tokens: int = 1 << 20
    in_step: int = 12
    whole_rows: bool = True
    lags: tuple[int, ...] = (1, 1)
    saved_tokens: int = 64
    group_bytes: int = 40 << 20
    bytes: int = 56 << 20

    def head_bytes(self, size: int, *widths: int) -> int:
        """Estimate of the backward kernel's VMEM for one head, in bytes.

        Args:
            size: tokens of a chunk.
            widths: channels of keys and values, and slots where tokens have them.
        """
        key, value, *slots = widths
        memory = slots[0] * (key + value) if slots else key * value
        # Two buffers of each block in and out: tokens and their cotangents.
        tokens = 4 * (2 * key + 2 * value + sum(slots))
        between = sum(n * width for n, width in zip(self.token, widths, strict=True))
        each = tokens + between + self.pairs * size
        return 4 * (size * each + self.memories * memory)


class Rows(NamedTuple):
    """Heads of a batch element in one program of a decoding step, at the most.

    Attributes:
        heads: whose code is written out one after the other.
        bytes: of their arrays, of which Mosaic has two or four copies.
    """

    heads: int
    bytes: int


class Tiles(NamedTuple):
    """Blocks of elementwise kernels, at the most: tokens, lanes, and rows of a tile."""

    tokens: int
    lanes: int
    rows: int
    convolved_rows: int


class Attention(NamedTuple):
    """The largest blocks, and tiles of a block where a mask hides some."""

    block: int
    tile: int


class Cached(NamedTuple):
    """The largest block of keys: slots, a power of two, and bytes."""

    slots: int
    bytes: int


class Scores(NamedTuple):
    """Rows of queries and keys in VMEM, at most, and those of a product."""

    block: int
    queries: int
    keys: int


class Tuned(NamedTuple):
    """A table of all kernels' sizes."""

    recurrence: Packed
    trellis: Packed
    lattice: Packed
    ttt_linear: Packed
    step: Rows
    head_step: Rows
    tiles: Tiles
    causal_attention: Attention
    cached_attention: Cached
    sigmoid_scores: Scores


SIZES = Tuned(
    # Estimates were made with the compiler's reports of VMEM.
    # Of delta rules a chain of small products takes most of a chunk.
    recurrence=Packed(memories=10, token=(12, 12), packs=16),
    trellis=Packed(
        memories=20,
        token=(10, 10, 40),
        pairs=0,
        chunks=8,
        rows=1 << 20,
        tokens=3072,
        in_step=4,
        whole_rows=False,
        lags=(1, 2, 1),
        bytes=96 << 20,
    ),
    lattice=Packed(memories=18, token=(20, 6), lags=(2, 8)),
    ttt_linear=Packed(memories=18, token=(12, 12), lags=(3, 6)),
    step=Rows(heads=16, bytes=3 << 20),
    head_step=Rows(heads=1 << 20, bytes=4 << 20),
    tiles=Tiles(tokens=512, lanes=1024, rows=128, convolved_rows=64),
    causal_attention=Attention(block=1024, tile=256),
    cached_attention=Cached(slots=1024, bytes=2 << 20),
    sigmoid_scores=Scores(block=2048, queries=512, keys=256),
)


def changed(op: str, **sizes: object) -> Tuned:
    """The table with other sizes of an op."""
    return SIZES._replace(**{op: getattr(SIZES, op)._replace(**sizes)})
