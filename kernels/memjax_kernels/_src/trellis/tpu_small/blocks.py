"""Blocks of 16 tokens in chunks of at most 8: from a block to its parts, and back.

A part is a chunk of every pack, its tokens in rows of heads (`equations`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from memjax_kernels._src.common import packs
from memjax_kernels._src.common.packs import decays as pack_decays
from memjax_kernels._src.common.packs.blocks import ROWS
from memjax_kernels._src.common.packs.chunkwise import Layout
from memjax_kernels._src.trellis.tpu_small.equations import Decays, Part

F32 = jnp.float32


class Rows(NamedTuple):
    """Room for the cotangents of a block's tokens, each [parts, P, C, .]."""

    q: Any
    k: Any
    v: Any
    alpha: Any


def whole(ref) -> Array:
    """All parts of a block, [P, 16, .]."""
    return jnp.concatenate([ref[part] for part in range(ref.shape[0])], axis=1)


def split(ref, x: Array, layout: Layout) -> None:
    """Writes a block's tokens [P, 16, .] as those of its parts, in float32."""
    for part in range(layout.parts):
        ref[part] = _of_part(x, part, layout).astype(F32)


def _of_part(x: Array, part: int, layout: Layout) -> Array:
    return x[:, part * layout.size : (part + 1) * layout.size]


def flags(x, layout: Layout, part):
    """Flags of full and of reset chunks, [P, 1, 1]; None where there are none."""

    def flag(index):
        first = x.gates.shape[2] - layout.opens - layout.resets
        column = first + index
        row = part * layout.size
        found = x.gates[:, pl.ds(row, 1), column : column + 1][:, None]
        return packs.each_pack(
            jnp.broadcast_to(found, (layout.rows, layout.group, 1, 1))
        )

    full = flag(0) if layout.opens else None
    return full, flag(int(layout.opens)) if layout.resets else None


def unpack(x, parts: Part, layout: Layout) -> None:
    """Writes tokens and gates of a block as those of its parts."""
    heads = layout.heads
    q, k, v, alpha = (packs.load_rows(ref, layout.group) for ref in x.tokens)
    slots = alpha.shape[-1] // heads
    for ref, tokens in zip(parts[:3], (q, k, v), strict=True):
        tokens = tokens.astype(F32)
        for part in range(layout.parts):
            ref[part] = packs.block_diagonal(_of_part(tokens, part, layout), heads)
    alpha = alpha.astype(F32)
    by_head = [alpha[:, :, i * slots : (i + 1) * slots] for i in range(heads)]
    _stack(parts.target, by_head, layout)
    each, (of_gamma, of_g) = heads * layout.group, layout.passes
    gammas = x.gates[:, :, : each * of_gamma]
    g = x.gates[:, :, each * of_gamma : each * (of_gamma + of_g)]
    for i, ref in enumerate(parts.gammas):
        _stack(ref, _columns(gammas, i * each, slots, layout), layout)
    sums = jnp.stack([pack_decays.sum_gates(row, layout.size) for row in g])
    for i, ref in enumerate(parts.decays):
        starts = i * each, (of_g + i) * each
        of_sums = [_columns(sums, at, slots, layout) for at in starts]
        _decay(ref, of_sums, layout)


def _decay(refs: Decays, of_sums: list[list[Array]], layout: Layout) -> None:
    """Writes decay factors, from the coarse and fine parts of the sums of gates."""
    size, heads = layout.size, layout.heads
    for part in range(layout.parts):
        sums = [_below(x, part, layout) for x in of_sums]
        refs.decay[part] = jnp.exp(sums[0] + sums[1])
        if size == 1:
            # A token is its chunk's end, and sees no other.
            continue
        refs.until[part] = jnp.exp(sum(_ends(x, layout) - x for x in sums))
        rows = size * heads
        shape = (sums[0].shape[0], rows, rows)
        row, lane = packs.sublane(shape), packs.lane(shape)

        def of(x):
            return jax.lax.div(x, jnp.int32(size))

        seen = (of(row) == of(lane)) & (row >= lane)
        between = jnp.zeros(shape, F32)
        for x in sums:
            column = jnp.broadcast_to(x[..., :1], shape)
            # The same along the lanes.
            other = jnp.where(row == lane, column, 0.0).sum(1, keepdims=True)
            between += column - other
        # Masked before exp, which would overflow above the diagonal.
        refs.between[part] = jnp.exp(jnp.where(seen, between, -1e30))


def _ends(x: Array, layout: Layout) -> Array:
    """The number of each head's last token, in all rows of the head."""
    size = layout.size
    last = [x[:, (i + 1) * size - 1 : (i + 1) * size] for i in range(layout.heads)]
    shape = (x.shape[0], size, x.shape[2])
    return jnp.concatenate([jnp.broadcast_to(row, shape) for row in last], axis=1)


def _columns(gates: Array, start: int, width: int, layout: Layout) -> list[Array]:
    """A column of each pack and head in so many lanes: of each head [P, 16, width]."""
    group = layout.group

    def wide(head):
        first = start + head * group
        columns = [
            row[:, first + i : first + i + 1] for row in gates for i in range(group)
        ]
        return jnp.stack([jnp.broadcast_to(c, (ROWS, width)) for c in columns])

    return [wide(head) for head in range(layout.heads)]


def _stack(ref, by_head: list[Array], layout: Layout) -> None:
    for part in range(layout.parts):
        ref[part] = _below(by_head, part, layout)


def _below(by_head: list[Array], part: int, layout: Layout) -> Array:
    """Each head's rows of a part below those of the head before."""
    return jnp.concatenate([_of_part(x, part, layout) for x in by_head], axis=1)


def row(column: Array, part, layout: Layout, later: bool = False) -> Array:
    """Numbers of a part's tokens [P, R, 1] in the lanes of a block, [P, 1, CC].

    With `later` sums of those from each token on: the cotangents of gates from those of
    their sums.
    """
    shape = (*column.shape[:2], layout.heads * ROWS)
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    size = jnp.int32(layout.size)
    head, token = jax.lax.div(row, size), jax.lax.rem(row, size)
    lane, first = packs.lane(shape), head * ROWS + part * size
    here = lane == first + token
    if later:
        here = (lane >= first) & (lane <= first + token)
    return jnp.sum(jnp.where(here, column, 0.0), axis=1, keepdims=True)
