"""The two kernels of Trellis for packs of heads: a block of a group, forward and back.

Each takes references to blocks in VMEM. `after` and `d_before` are output blocks that
all chunks of a head share: they hold the memories, or their cotangents, between chunks.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from memjax_kernels._src.common import packs, products
from memjax_kernels._src.common.packs.chunk_kernels import choose, load, store
from memjax_kernels._src.common.packs.layout import Layout
from memjax_kernels._src.common.packs.staggered import in_turn
from memjax_kernels._src.trellis import packed, packed_gradient
from memjax_kernels._src.trellis import tpu_packed_blocks as blocks
from memjax_kernels._src.trellis.chunk import Options

F32 = jnp.float32


def forward_kernel(
    x, before, empty, after, y, residuals, *, layout: Layout, options: Options
):
    """One chunk; with `residuals`, also saves the memories before it."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        # Chunks of a head share this output block.
        store(after, load(before))

    gates = blocks.gates(x, layout, options.bound_steps)
    full, reset = blocks.flags(x, layout)

    def advance(of: blocks.Packs):
        tokens = packed.Chunk(*map(of.tokens, x.tokens))
        given = of.gates(gates)
        ready = yield from packed.prepare(tokens, given, options)
        yield
        start = of.memories(after)
        if reset is not None:
            start = choose(of.of(reset), of.memories(empty), start)
        if residuals is not None and of.is_saved:
            of.save(residuals, start)

        def keep(new):
            # A chunk that stays open leaves the memories at its start.
            of.store_memories(after, choose(of.of(full), new, start))

        keys, values = start
        read = yield from packed.advance(ready, given, keys, values, options, keep)
        of.store_tokens(y, read)

    in_turn([advance(of) for of in blocks.each_group(layout)], layout.lags[0])


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
    *,
    layout: Layout,
    options: Options,
):
    """Cotangents of one chunk, after those of the chunks behind it."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        store(d_before, load(d_after))
        store(d_empty, jax.tree.map(lambda ref: jnp.zeros(ref.shape, F32), d_empty))

    gates = blocks.gates(x, layout, options.bound_steps)
    full, reset = blocks.flags(x, layout)

    # Memories after the last chunk that was written again, by the first pack.
    running: dict[int, tuple[Array, Array]] = {}

    def write(of: blocks.Packs):
        tokens = packed.Chunk(*map(of.tokens, x.tokens))
        given = of.gates(gates)
        ready = yield from packed.prepare(tokens, given, options)
        yield
        start = of.saved(residuals) if of.is_saved else running[of.start]
        if reset is not None:
            start = choose(of.of(reset), of.memories(empty), start)
        d = of.tokens(d_y)
        chunk = packed_gradient.write(ready, given, start, d, options)
        yield
        if not of.next_is_saved:
            new = packed.after(ready, given, start, chunk.writes, options.multiply)
            running[of.start] = choose(of.of(full), new, start)
        return chunk

    def vjp(of: blocks.Packs):
        if of in known:
            chunk = known[of]
            # In step with the others: it takes what a later chunk kept.
            yield
            yield
            if options.normalize:
                yield
        else:
            chunk = yield from write(of)
        zeros = jax.tree.map(jnp.zeros_like, chunk.memories)

        def d_new():
            return choose(of.of(full), of.memories(d_before), zeros)

        def keep(d_start):
            d_start = add_unless(of.of(full), d_start, of.memories(d_before))
            if reset is not None:
                # Every reset reads `empty`, so that its gradient is a sum over chunks.
                emptied = choose(of.of(reset), d_start, zeros)
                sums = jax.tree.map(jnp.add, of.memories(d_empty), emptied)
                of.store_memories(d_empty, sums)
                d_start = choose(of.of(reset), zeros, d_start)
            of.store_memories(d_before, d_start)

        found = yield from packed_gradient.vjp(chunk, d_new, options, keep)
        for ref, d in zip(d_tokens, found.x, strict=True):
            of.store_tokens(ref, d)
        both = found.gamma, _from_sums(found.total, layout.heads)
        # Of a gate that both passes share, the sum.
        rows = [
            d
            for of_gate, passes in zip(both, layout.passes, strict=True)
            for d in (of_gate if passes == 2 else [of_gate[0] + of_gate[1]])
        ]
        of.store_gates(d_gates, jnp.concatenate(rows, axis=1))

    # Memories that are not saved follow from the writes of the chunk before.
    groups = blocks.each_group(layout)
    first = [of for of in groups if not of.next_is_saved]
    written = in_turn([write(of) for of in first], layout.lags[1])
    known = dict(zip(first, written, strict=True))
    lag = layout.lags[2 if first else 1]
    in_turn([vjp(of) for of in reversed(groups)], lag)


def _from_sums(d: tuple[Array, ...], heads: int) -> list[Array]:
    """Cotangents of gates from those of their sums: sums from each token on."""
    rows = jnp.concatenate(d)[:, 0]
    shape = (rows.shape[1],) * 2
    token, before = packs.sublane(shape), packs.lane(shape)
    start = before - packs.within(shape, shape[0] // heads)
    later = (token >= before) & (token < start + shape[0] // heads)
    # One matrix for all parts.
    parts = jnp.concatenate(packs.in_bfloat16(rows))
    dtype = jnp.dtype(jnp.bfloat16)
    found = products.multiply(parts, later.astype(F32), "nn", dtype)
    total = functools.reduce(jnp.add, jnp.split(found, 3))
    return jnp.split(total[:, None], len(d))


def add_unless(full, found, d):
    """Cotangents before a chunk: with those behind it where it was not full."""
    if full is None:
        return found
    return jax.tree.map(lambda a, b: a + jnp.where(full > 0.5, 0.0, b), found, d)
