"""The plan of a program of packed heads, by the table of `tuned`."""

from collections.abc import Sequence
from typing import NamedTuple

import jax

from memjax_kernels._src.common.chunks import Chunks
from memjax_kernels._src.common.packs.blocks import LANES
from memjax_kernels._src.common.packs.tuned import Packed


class Layout(NamedTuple):
    """Sizes of a program's blocks.

    Attributes:
        rows: batch elements.
        group: packs of each.
        heads: of a pack.
        size: tokens of a chunk.
        passes: of each gate, the columns of a head.
        opens: whether there is a flag of chunks that are full; else all are.
        resets: whether there is a flag of chunks that start from `empty`.
        phased: groups of packs that go through a chunk's phases one behind the other.
        lags: phases by which each is behind the one before it; see `tuned.Packed`.
        ways: value heads of a key head, which divide those of a program or are divided
            by them.
        chunks: of a block, a divisor of all.
        saved: memories of a block that are saved for the backward kernel, those before
            as many chunks: a divisor of `chunks`.
    """

    rows: int
    group: int
    heads: int
    size: int
    passes: tuple[int, ...]
    opens: bool
    resets: bool
    phased: int = 1
    lags: tuple[int, ...] = (1, 1)
    ways: int = 1
    chunks: int = 1
    saved: int = 1

    @property
    def share(self) -> int:
        """Programs that read the same key head."""
        return max(1, self.ways // (self.group * self.heads))

    @property
    def of_row(self) -> tuple[int, int]:
        """Packs of a batch element, and heads of a pack."""
        return self.group, self.heads

    @property
    def gate_columns(self) -> int:
        """Columns of a block of gates before its flags."""
        return self.heads * self.group * sum(self.passes)


def packings(sizes: Packed, number: int, size: int, widths: Sequence[int]) -> list[int]:
    """Numbers of heads of a pack, ascending, that fill whole registers and fit in VMEM.

    Args:
        sizes: of the op.
        number: of heads, which packs divide evenly.
        size: tokens of a chunk.
        widths: channels of keys and values of a head, and slots.
    """
    each = sizes.head_bytes(size, *widths)
    return [
        heads
        for heads in range(1, number + 1)
        if number % heads == 0
        and all(heads * width % LANES == 0 for width in widths)
        and heads * each <= sizes.group_bytes
    ]


def group_sizes(sizes: Packed, packs: int, pack_bytes: int) -> list[int]:
    """All numbers of packs that a program may have, the largest first."""
    return divisors(packs, min(sizes.packs, sizes.group_bytes // pack_bytes))


def plan(sizes: Packed, x: Chunks, heads: int) -> Layout:
    """The program of an op's chunks, with `heads` in a pack."""
    batch, of_all, size, number = x.tokens[0].shape[:4]
    widths = [tokens.shape[4] for tokens in x.tokens[1:]]
    each = heads * sizes.head_bytes(size, *widths)
    group = group_sizes(sizes, number // heads, each)[0]
    # Chunks first: of one behind another all but the memories is computed meanwhile.
    most = min(sizes.bytes // (group * each), sizes.tokens // (group * heads * size))
    chunks = divisors(of_all, min(sizes.chunks, most))[0]
    rows = divisors(batch, min(sizes.rows, most // chunks))[0]
    of_row = group if sizes.whole_rows else 1
    parts = rows * group // of_row
    return Layout(
        rows,
        group,
        heads,
        size,
        passes=tuple((*gate.shape[4:], 1)[0] for gate in jax.tree.leaves(x.gates)),
        opens=x.full is not None,
        resets=x.reset is not None,
        phased=parts // divisors(parts, sizes.in_step // of_row)[0],
        lags=sizes.lags,
        chunks=chunks,
        saved=chunks if size >= sizes.saved_tokens else 1,
    )


def divisors(number: int, most: int) -> list[int]:
    """The divisors up to `most`, the largest first; 1 is always one."""
    return [n for n in range(max(1, most), 0, -1) if number % n == 0]
