"""Blocks of the Trellis kernels for packs of heads: what a program reads and writes.

A block is a chunk of every pack, or 16 tokens of smaller chunks, its parts. What is
computed for a part is computed for all tokens of the block: gates of tokens that are
not the part's are zeros, so that they write nothing, and their reads are not stored.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from memjax_kernels.common import packs
from memjax_kernels.common.packs import decays as pack_decays
from memjax_kernels.trellis import packed
from memjax_kernels.trellis.chunk import Options
from memjax_kernels.trellis.packed import Chunk, Gates

F32 = jnp.float32


class Layout(NamedTuple):
    """What the blocks of a program hold.

    Attributes:
        rows: batch elements.
        group: packs of each.
        heads: of a pack.
        gammas: 2 where each pass has its own, else 1.
        gates: likewise.
        apart: whether a chunk may find two memories that differ; else they do so after
            the last chunk alone.
        resets: whether there is a flag of chunks that start from `empty`.
        size: tokens of a chunk.
        parts: chunks of a block, one after the other; small ones fill no register.
    """

    rows: int
    group: int
    heads: int
    gammas: int
    gates: int
    apart: bool
    resets: bool
    size: int
    parts: int

    @property
    def gate_columns(self) -> int:
        """Columns of a block of gates before its flags."""
        return self.heads * self.group * (self.gammas + self.gates)


class Block(NamedTuple):
    """The chunks of P = rows * group packs, before any memory is read."""

    tokens: Chunk
    gates: tuple[Gates, Gates]
    ready: packed.Prepared


def read(x, layout: Layout, options: Options) -> Block:
    """All chunks of references to `tpu_packed.Blocks`."""
    tokens = Chunk(*(packs.load_rows(ref, layout.group) for ref in x.tokens))
    gates = _gates(x.gates[:, :, : layout.gate_columns], layout)
    size = layout.size if layout.parts > 1 else None
    return Block(tokens, gates, packed.prepare(tokens, gates, options, size))


def flags(x, layout: Layout, part) -> tuple[Array, Array | None]:
    """Whether a chunk is complete, and cleared: [P, 1, 1]."""
    columns = x.gates[:, :, layout.gate_columns :]
    if layout.parts > 1:
        columns = jnp.where(_rows(columns.shape[1], layout, part)[None], columns, 0.0)
    # All tokens of a chunk have its flags.
    found = jnp.max(columns, axis=1, keepdims=True)[:, None]

    def flag(index):
        each = found[..., index : index + 1]
        return packs.each_pack(
            jnp.broadcast_to(each, (layout.rows, layout.group, 1, 1))
        )

    return flag(0), flag(1) if layout.resets else None


def of_part(gates: tuple[Gates, Gates], layout: Layout, part) -> tuple[Gates, Gates]:
    """The gates of a chunk, whose end they have. Other tokens write nothing."""
    if layout.parts == 1:
        return gates
    first, second = gates
    shape = first.gamma.shape
    here = chunk_of_lanes(shape, layout) == part
    totals = [first.total]
    if second.total is not first.total:
        totals.append(second.total)
    # The chunk's last token.
    token = jax.lax.broadcasted_iota(jnp.int32, first.total.column[0].coarse.shape, 1)
    last = token == (part + 1) * layout.size - 1
    end = lambda x: jnp.sum(jnp.where(last, x, 0.0), axis=1, keepdims=True)
    totals = [x._replace(end=jax.tree.map(end, x.column)) for x in totals]
    steps = [jnp.where(here, gate.gamma, 0.0) for gate in gates]
    return Gates(steps[0], totals[0]), Gates(steps[1], totals[-1])


def chunk_of_lanes(shape, layout: Layout) -> Array:
    """The chunk of each lane's token."""
    token = packs.within(shape, shape[-1] // layout.heads)
    return jax.lax.div(token, jnp.int32(layout.size))


def _rows(number: int, layout: Layout, part) -> Array:
    """Which tokens of a block are of a chunk, [number, 1]."""
    token = jax.lax.broadcasted_iota(jnp.int32, (number, 1), 0)
    return jax.lax.div(token, jnp.int32(layout.size)) == part


def tokens_alone(x: Array, layout: Layout, part) -> Array:
    """Tokens [P, C, DD], those of other chunks cleared."""
    if x.dtype != jnp.bfloat16:
        return jnp.where(_rows(x.shape[1], layout, part)[None], x, 0.0)
    # A word holds two tokens.
    words = pltpu.bitcast(x, jnp.int32)
    first = 2 * jax.lax.broadcasted_iota(jnp.int32, (words.shape[1], 1), 0)
    size = jnp.int32(layout.size)
    low = jnp.where(jax.lax.div(first, size) == part, 0xFFFF, 0)
    high = jnp.where(jax.lax.div(first + 1, size) == part, -0x10000, 0)
    return pltpu.bitcast(words & (low | high)[None], jnp.bfloat16)


def _gates(block: Array, layout: Layout) -> tuple[Gates, Gates]:
    """Gates of both passes, of a block [rows, C, R] of gammas and gates."""
    steps, totals = zip(*(_gates_of_row(row, layout) for row in block), strict=True)
    join = lambda *parts: jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    steps, totals = ([join(*x) for x in zip(*y, strict=True)] for y in (steps, totals))
    return Gates(steps[0], totals[0]), Gates(steps[-1], totals[-1])


def _gates_of_row(block: Array, layout: Layout):
    """Step sizes and sums of gates of each pass, of a batch element's [C, R]."""
    group, heads = layout.group, layout.heads
    each = heads * group
    gammas = block[:, : each * layout.gammas]
    g = block[:, gammas.shape[1] :]
    sums = pack_decays.sum_gates(g, layout.size if layout.parts > 1 else None)
    columns = jnp.concatenate([gammas, sums], axis=1)
    rows = pack_decays.transpose(columns)

    def total(index):
        coarse = each * (layout.gammas + index)
        fine = coarse + each * layout.gates
        return pack_decays.total(columns, rows, (coarse, fine), group, heads)

    steps = [
        pack_decays.side_by_side(rows, each * index, group, heads)
        for index in range(layout.gammas)
    ]
    return steps, [total(index) for index in range(layout.gates)]


def load(refs):
    """Memories in float32, [P, M, DD]."""
    return jax.tree.map(lambda ref: packs.each_pack(ref[...]).astype(F32), refs)


def store(refs, values):
    """Undoes `load`."""

    def write(ref, x):
        ref[...] = x.reshape(ref.shape).astype(ref.dtype)

    jax.tree.map(write, refs, values)


def memories_at(refs, part):
    """The memories of one chunk of a block, [rows, group, parts, M, DD]."""
    return jax.tree.map(lambda ref: ref.at[:, :, part], refs)


def store_tokens(ref, x: Array, layout: Layout, part) -> None:
    """Writes the tokens of a chunk, [P, C, DD], beside those of the others."""
    if layout.parts > 1:
        here = _rows(x.shape[1], layout, part)[None]
        x = jnp.where(here, x, packs.load_rows(ref, layout.group).astype(F32))
    packs.store_rows(ref, x)
