"""The two kernels of Lattice for packs of heads: a chunk of a group, forward and back.

Each takes references to blocks in VMEM. `after` and its cotangent are output blocks
that all chunks of a head share: they hold them between chunks.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from memjax_kernels._src.common import packs
from memjax_kernels._src.common.packs import columns as pack_columns
from memjax_kernels._src.common.packs.staggered import staggered
from memjax_kernels._src.lattice import packed, packed_gradient
from memjax_kernels._src.lattice.packed import Chunk, Options

F32 = jnp.float32
# Phases by which a group of rows is behind the one before it, counted for a v5e.
FORWARD_LAG, BACKWARD_LAG = 3, 6


class Layout(NamedTuple):
    """Sizes of a program's blocks.

    `group` packs of `heads` heads for each of `rows` batch elements; `resets`: whether
    there is a flag of chunks that start from `empty`; `phased`: groups of rows that go
    through a chunk's phases one behind the other.
    """

    rows: int
    group: int
    heads: int
    resets: bool
    phased: int


class _Block(NamedTuple):
    """A chunk of P = rows * group packs; flags are float32 [P, 1, 1]."""

    chunk: Chunk
    full: Array
    reset: Array | None


def forward_kernel(
    x, before, empty, after, y, residuals, *, layout: Layout, options: Options
):
    """One chunk; with `residuals`, also saves the memory before it."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        after[...] = before[...]

    block = _read(x, layout)
    start = _load(after)
    if block.reset is not None:
        start = _choose(block.reset, _load(empty), start)
    if residuals is not None:
        _store(residuals, start)
    moved, read = staggered(
        functools.partial(packed.advance, options=options),
        (block.chunk, start),
        layout.phased,
        FORWARD_LAG,
    )
    # A chunk that stays open leaves the memory at its start.
    _store(after, _choose(block.full, moved.after, start))
    packs.store_rows(y, read)


def backward_kernel(
    x,
    empty,
    residuals,
    d_after,
    d_y,
    d_tokens,
    d_gates,
    d_start,
    d_empty,
    *,
    layout: Layout,
    options: Options,
):
    """Cotangents of one chunk, after those of the chunks behind it."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        d_start[...] = d_after[...]
        d_empty[...] = jnp.zeros(d_empty.shape, F32)

    block = _read(x, layout)
    d_whole = _load(d_start)
    zeros = jnp.zeros_like(d_whole)
    d_new = _choose(block.full, d_whole, zeros)
    reads = packs.load_rows(d_y, layout.group)
    found = staggered(
        functools.partial(packed_gradient.vjp, options=options),
        (block.chunk, _load(residuals).astype(F32), d_new, reads),
        layout.phased,
        BACKWARD_LAG,
    )
    d = found.start + (d_whole - d_new)
    if block.reset is not None:
        # Every reset reads `empty`, so that its gradient is a sum over chunks.
        _store(d_empty, _load(d_empty) + _choose(block.reset, d, zeros))
        d = _choose(block.reset, zeros, d)
    _store(d_start, d)
    for ref, value in zip(d_tokens, found.x[:3], strict=True):
        packs.store_rows(ref, value)
    d_gates[...] = pack_columns.sum_lanes(
        found.x.gamma, d_gates.shape, layout.group, layout.heads
    )


def _read(x, layout: Layout) -> _Block:
    """The chunk of references to `tpu_packed.Blocks`."""
    gates = x.gates[...]
    q, k, v = (packs.load_rows(ref, layout.group) for ref in x.tokens)
    first = layout.heads * layout.group

    def flag(index):
        each = gates[:, :1, first + index : first + index + 1]
        return packs.each_pack(
            jnp.broadcast_to(each[:, None], (*each.shape[:1], layout.group, 1, 1))
        )

    reset = flag(1) if layout.resets else None
    return _Block(
        Chunk(
            q, k, v, pack_columns.spread(gates, q.shape[-1], layout.group, layout.heads)
        ),
        flag(0),
        reset,
    )


def _load(ref) -> Array:
    return packs.each_pack(ref[...])


def _store(ref, x: Array):
    ref[...] = x.reshape(ref.shape).astype(ref.dtype)


def _choose(flag, new, old):
    """`new` where the flag is 1."""
    return jnp.where(flag > 0.5, new, old)
