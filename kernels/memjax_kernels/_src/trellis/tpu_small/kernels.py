"""The two kernels of Trellis for chunks of at most 8 tokens: a block of 16 tokens.

Each takes references to blocks in VMEM. `after` and `d_before` are output blocks that
all blocks of a head share: they hold the memories, or their cotangents, between blocks.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from memjax_kernels._src.common import packs
from memjax_kernels._src.common.packs.chunk_kernels import choose, load, store
from memjax_kernels._src.common.packs.chunkwise import Layout
from memjax_kernels._src.trellis.chunk import Options
from memjax_kernels._src.trellis.tpu_packed_kernels import add_unless
from memjax_kernels._src.trellis.tpu_small.blocks import (
    Rows,
    flags,
    row,
    split,
    unpack,
    whole,
)
from memjax_kernels._src.trellis.tpu_small.equations import (
    Part,
    Rules,
    advance,
    rewrite,
    vjp,
)

F32 = jnp.float32


def forward_kernel(
    x,
    before,
    empty,
    after,
    y,
    residuals,
    parts: Part,
    reads,
    *,
    layout: Layout,
    options: Options,
):
    """One block; with `residuals`, also saves the memories before it."""
    rules = Rules(options, layout.heads, layout.size)

    @pl.when(pl.program_id(2) == 0)
    def _():
        # Later blocks find what the one before left: all share this output block.
        store(after, load(before))

    unpack(x, parts, layout)
    if residuals is not None:
        store(residuals, load(after))

    def chunk(part, _):
        full, reset = flags(x, layout, part)
        start = load(after)
        if reset is not None:
            start = choose(reset, load(empty), start)
        keys, values = start
        new, reads[part] = advance(_part(parts, part), keys, values, rules)
        # A chunk that stays open leaves the memories at its start.
        store(after, choose(full, new, start))

    jax.lax.fori_loop(0, layout.parts, chunk, None)
    packs.store_rows(y, whole(reads))


def backward_kernel(
    x,
    empty,
    residuals,
    d_after,
    d_y,
    d_tokens,
    d_gates,
    d_before,
    d_empty,
    parts: Part,
    d_reads,
    d_parts: Rows,
    memories: tuple[Any, Any],
    *,
    layout: Layout,
    options: Options,
):
    """Cotangents of one block, after those of the blocks behind it."""
    rules = Rules(options, layout.heads, layout.size)
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)

    @pl.when(pl.program_id(2) == 0)
    def _():
        store(d_before, load(d_after))
        store(d_empty, jax.tree.map(lambda ref: jnp.zeros(ref.shape, F32), d_empty))

    unpack(x, parts, layout)
    split(d_reads, packs.load_rows(d_y, layout.group), layout)
    d_gates[...] = jnp.zeros(d_gates.shape, F32)
    _write_memories(memories, 0, load(residuals))

    def begin(part):
        """The memories that a chunk finds, and its flags."""
        full, reset = flags(x, layout, part)
        start = tuple(ref[part] for ref in memories)
        if reset is not None:
            start = choose(reset, load(empty), start)
        return start, full, reset

    def recompute(part, _):
        start, full, _ = begin(part)
        keys, values = start
        new = rewrite(_part(parts, part), keys, values, rules)
        _write_memories(memories, part + 1, choose(full, new, start))

    def back(i, _):
        part = layout.parts - 1 - i
        start, full, reset = begin(part)
        d = load(d_before)
        d_new = choose(full, d, zeros(d))
        (keys, values), tokens = start, _part(parts, part)
        found = vjp(tokens, keys, values, d_new, d_reads[part], rules)
        of_memories = tuple(
            x.decayed + rules.dot(x.left, x.right, "tn")
            for x in (found.keys, found.values)
        )
        d_start = add_unless(full, of_memories, d)
        if reset is not None:
            # Every reset reads `empty`, so that its gradient is a sum over chunks.
            emptied = choose(reset, d_start, zeros(d_start))
            store(d_empty, jax.tree.map(jnp.add, load(d_empty), emptied))
            d_start = choose(reset, zeros(d_start), d_start)
        store(d_before, d_start)
        for ref, d_x in zip(d_parts, found[:4], strict=True):
            ref[part] = d_x
        gammas, sums = found.numbers[:2], found.numbers[2:]
        rows = [row(d, part, layout) for d in gammas]
        rows += [row(d, part, layout, later=True) for d in sums]
        d_gates[...] += jnp.concatenate(rows, axis=1).reshape(d_gates.shape)

    jax.lax.fori_loop(0, layout.parts - 1, recompute, None)
    jax.lax.fori_loop(0, layout.parts, back, None)
    for ref, d_x in zip(d_tokens, d_parts, strict=True):
        packs.store_rows(ref, whole(d_x))


def _write_memories(memories, part, new) -> None:
    for ref, x in zip(memories, new, strict=True):
        ref[part] = x


def _part(parts: Part, part) -> Part:
    return jax.tree.map(lambda ref: ref[part], parts)
