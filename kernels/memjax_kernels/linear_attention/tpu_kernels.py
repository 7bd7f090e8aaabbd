"""The two kernels of linear attention and SSD: a chunk of a group, forward and back.

Each takes references to blocks in VMEM. The memory and its cotangent are output blocks
that all chunks of a head share: they hold them between chunks.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from memjax_kernels.common import packs
from memjax_kernels.common.packs import columns as pack_columns
from memjax_kernels.common.packs import decays as pack_decays
from memjax_kernels.linear_attention import packed

F32 = jnp.float32


class Static(NamedTuple):
    """What is fixed when a kernel is compiled."""

    group: int
    heads: int
    interpret: Any


def forward_kernel(x, before, after, y, kept, *, static: Static, dot):
    """One chunk; `kept` None does not keep the memory before it."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        after[...] = before[...]

    start = after[...]
    if kept is not None:
        kept[...] = start.astype(kept.dtype)
    after[...], read = packed.advance(_read(x, static), start, dot)
    packs.store(y, read)


def backward_kernel(x, kept, d_after, d_y, d_x, d_memory, *, static: Static, dot):
    """Cotangents of one chunk, after those of the chunks behind it."""
    d_tokens, d_gates = d_x

    @pl.when(pl.program_id(2) == 0)
    def _():
        d_memory[...] = d_after[...]

    start, given = kept[...].astype(F32), packs.load(d_y, static.group)
    found = packed.pull_back(_read(x, static), start, d_memory[...], given, dot)
    d_memory[...] = found.start
    for ref, value in zip(d_tokens, found[:3], strict=True):
        packs.store(ref, value)
    packing = static.group, static.heads
    columns = [
        pack_columns.sum_lanes(part, (1, *d_gates.shape), *packing)[0]
        for part in (found.sums, found.end)
    ]
    d_gates[...] = pack_decays.sum_back(columns[0] + columns[1])


def _read(x: Any, static: Static) -> packed.Chunk:
    q, k, v = (packs.load(ref, static.group) for ref in x.tokens)
    columns = pack_decays.sum_gates(x.gates[...])
    rows = pack_decays.transpose(columns)
    coarse, fine = jnp.split(columns, 2, axis=1)
    starts = (0, coarse.shape[1])
    total = pack_decays.total(columns, rows, starts, static.group, static.heads)
    until = (coarse[-1:] - coarse) + (fine[-1:] - fine)

    def in_lanes(column):
        spread = pack_columns.spread
        return jnp.exp(spread(column[None], q.shape[-1], static.group, static.heads))

    return packed.Chunk(q, k, v, total, in_lanes(coarse + fine), in_lanes(until))
