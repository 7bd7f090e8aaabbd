"""The two kernels of Lattice with C = 1: a block of tokens, forward and backward.

Each takes references to blocks in VMEM. The memory and its cotangents are output blocks
that all blocks of tokens share: they hold them between blocks.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from memjax_kernels._src.common import packs
from memjax_kernels._src.common.packs import columns as pack_columns
from memjax_kernels._src.common.packs.blocks import ROWS
from memjax_kernels._src.lattice.tpu_token.equations import (
    Sums,
    Token,
    advance,
    move,
    rows_of_slots,
    slots_of_rows,
    vjp,
)

F32 = jnp.float32


class Rows(NamedTuple):
    """A block's tokens and rates, or their cotangents: float32 [P, 16, .] in VMEM.

    Of an array in bfloat16 single rows cannot be read.
    """

    q: Any
    k: Any
    v: Any
    gamma: Any


def forward_kernel(
    x, before, empty, after, y, residuals, rows: Rows, reads, *, layout, variant
):
    """One block; with `residuals`, also saves the memory before it."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        after[...] = before[...]

    if residuals is not None:
        residuals[...] = after[...]
    _unpack(x, rows, layout)

    def one(t):
        start = packs.each_pack(after[...])
        if layout.resets:
            flag = _cleared(x, t, layout)
            start = jnp.where(flag > 0.5, packs.each_pack(empty[...]), start)
        token = _token(rows, x, t, layout)
        new, reads[:, pl.ds(t, 1), :] = advance(token, start, variant, layout.heads)
        after[...] = new.reshape(after.shape)

    _in_pairs(one)
    packs.store_rows(y, reads[...])


def _in_pairs(one) -> None:
    """Calls one(t) for the tokens of a block; two are scheduled together."""

    def two(i, _):
        one(2 * i)
        one(2 * i + 1)

    jax.lax.fori_loop(0, ROWS // 2, two, None)


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
    rows: Rows,
    d_reads,
    d_rows: Rows,
    memories,
    sums: Sums,
    *,
    layout,
    variant,
):
    """Cotangents of one block, after those of the blocks behind it."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        d_start[...] = d_after[...]
        d_empty[...] = jnp.zeros(d_empty.shape, F32)

    _unpack(x, rows, layout)
    d_reads[...] = packs.load_rows(d_y, layout.group).astype(F32)
    memories[0] = packs.each_pack(residuals[...])

    def begin(t):
        if layout.resets:
            # The memory before a token is the empty one after a reset.
            flag = _cleared(x, t, layout)
            emptied = packs.each_pack(empty[...])
            memories[t] = jnp.where(flag > 0.5, emptied, memories[t])
        return memories[t]

    def recompute(t):
        token = _token(rows, x, t, layout)
        moved = move(token, begin(t), variant, layout.heads)
        sums.along[t], sums.inverse[t] = moved.sums
        memories[t + 1] = moved.memory * moved.sums.inverse

    # Cotangents of bfloat16 are rounded to it.
    count = 2 if x.tokens[0].dtype == jnp.bfloat16 else 3
    by_row = functools.partial(rows_of_slots, count=count)

    def back(i):
        t = ROWS - 1 - i
        at, start = pl.ds(t, 1), memories[t]
        d_memory, token = packs.each_pack(d_start[...]), _token(rows, x, t, layout)
        known = Sums(sums.along[t], sums.inverse[t])
        given = (known, d_memory, d_reads[:, at, :], variant, layout.heads)
        d, d_memory = vjp(token, start, *given)
        if layout.resets:
            flag = _cleared(x, t, layout)
            zeros = jnp.zeros_like(d_memory)
            emptied = jnp.where(flag > 0.5, d_memory, zeros)
            d_empty[...] += emptied.reshape(d_empty.shape)
            d_memory = jnp.where(flag > 0.5, zeros, d_memory)
        d_start[...] = d_memory.reshape(d_start.shape)
        width = rows.q.shape[-1]
        d_rows.q[:, at, :] = by_row(d.q, width, layout.heads)
        d_rows.k[:, at, :] = by_row(d.k, width, layout.heads)
        d_rows.v[:, at, :], d_rows.gamma[:, at, :] = d.v, d.gamma

    _in_pairs(recompute)
    _in_pairs(back)
    for ref, d in zip(d_tokens, d_rows[:3], strict=True):
        packs.store_rows(ref, d[...])
    d_gates[...] = pack_columns.sum_lanes(
        d_rows.gamma[...], d_gates.shape, layout.group, layout.heads
    )


def _unpack(x, rows: Rows, layout):
    """Writes a block's tokens and rates in float32."""
    for ref, tokens in zip(rows[:3], x.tokens, strict=True):
        ref[...] = packs.load_rows(tokens, layout.group).astype(F32)
    width = rows.gamma.shape[-1]
    rows.gamma[...] = pack_columns.spread(
        x.gates[...], width, layout.group, layout.heads
    )


def _token(rows: Rows, x, t, layout) -> Token:
    q, k, v, gamma = (ref[:, pl.ds(t, 1), :] for ref in rows)
    # Tokens in bfloat16 are one part.
    count = 1 if x.tokens[0].dtype == jnp.bfloat16 else 3
    columns = functools.partial(
        slots_of_rows, width=v.shape[-1], heads=layout.heads, count=count
    )
    return Token(columns(q), columns(k), v, gamma)


def _cleared(x, t, layout) -> Float[Array, "P 1 1"]:
    first = layout.heads * layout.group
    flag = x.gates[:, pl.ds(t, 1), first : first + 1][:, None]
    shape = (layout.rows, layout.group, 1, 1)
    return packs.each_pack(jnp.broadcast_to(flag, shape))
