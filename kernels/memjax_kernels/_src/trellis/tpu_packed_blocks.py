"""Blocks of the Trellis kernels for packed heads: reads and writes of a program.

A block is a chunk of every pack.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from memjax_kernels._src.common import packs
from memjax_kernels._src.common.packs import decays as pack_decays
from memjax_kernels._src.common.packs.chunkwise import Layout
from memjax_kernels._src.trellis import packed
from memjax_kernels._src.trellis.chunk import Options
from memjax_kernels._src.trellis.packed import Chunk, Gates

F32 = jnp.float32


class Block(NamedTuple):
    """The chunks of P = rows * group packs, before any memory is read."""

    tokens: Chunk
    gates: tuple[Gates, Gates]
    ready: packed.Prepared


def read(x, layout: Layout, options: Options) -> Block:
    """All chunks of references to `chunkwise.Blocks`."""
    tokens = Chunk(*(packs.load_rows(ref, layout.group) for ref in x.tokens))
    gates = _gates(x.gates[:, :, : layout.gate_columns], layout)
    return Block(tokens, gates, packed.prepare(tokens, gates, options))


def flags(x, layout: Layout) -> tuple[Array | None, Array | None]:
    """Flags of full and of reset chunks, [P, 1, 1]; None where there are none."""
    if not layout.opens and not layout.resets:
        return None, None
    columns = x.gates[:, :, layout.gate_columns :]
    # All tokens of a chunk have its flags.
    found = jnp.max(columns, axis=1, keepdims=True)[:, None]

    def flag(index):
        each = found[..., index : index + 1]
        return packs.each_pack(
            jnp.broadcast_to(each, (layout.rows, layout.group, 1, 1))
        )

    full = flag(0) if layout.opens else None
    return full, flag(int(layout.opens)) if layout.resets else None


def _gates(block: Array, layout: Layout) -> tuple[Gates, Gates]:
    """Gates of both passes, of a block [rows, C, R] of gammas and gates."""
    steps, totals = zip(*(_gates_of_row(row, layout) for row in block), strict=True)

    def join(*parts):
        return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)

    steps, totals = ([join(*x) for x in zip(*y, strict=True)] for y in (steps, totals))
    return Gates(steps[0], totals[0]), Gates(steps[-1], totals[-1])


def _gates_of_row(block: Array, layout: Layout):
    """Step sizes and sums of gates of each pass, of a batch element's [C, R]."""
    group, heads, (of_gamma, of_g) = layout.group, layout.heads, layout.passes
    each = heads * group
    gammas = block[:, : each * of_gamma]
    g = block[:, gammas.shape[1] :]
    sums = pack_decays.sum_gates(g)
    columns = jnp.concatenate([gammas, sums], axis=1)
    rows = pack_decays.transpose(columns)

    def total(index):
        coarse = each * (of_gamma + index)
        fine = coarse + each * of_g
        return pack_decays.total(columns, rows, (coarse, fine), group, heads)

    steps = [
        pack_decays.pack_heads(rows, each * index, group, heads)
        for index in range(of_gamma)
    ]
    return steps, [total(index) for index in range(of_g)]
