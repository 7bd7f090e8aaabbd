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
from memjax_kernels._src.trellis import packed, packed_gradient
from memjax_kernels._src.trellis import tpu_packed_blocks as blocks
from memjax_kernels._src.trellis.chunk import Options
from memjax_kernels._src.trellis.packed import Memory
from memjax_kernels._src.trellis.state import Memories
from memjax_kernels._src.trellis.tpu_packed_blocks import Layout

F32 = jnp.float32
# Of gates, which tokens in bfloat16 do not round.
_exact = functools.partial(products.multiply, dtype=jnp.dtype(F32))


def choose(flag, new, old):
    """`new` where the flag is 1."""
    return jax.tree.map(lambda a, b: jnp.where(flag > 0.5, a, b), new, old)


def forward_kernel(
    x, before, empty, after, y, residuals, *, layout: Layout, options: Options
):
    """One chunk; with `residuals`, also saves the memories before it."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        # Chunks of a head share this output block.
        blocks.store(after, blocks.load(before))

    block = blocks.read(x, layout, options)
    full, reset = blocks.flags(x, layout)
    running = blocks.load(after.running)
    start = blocks.load(after.start) if layout.two_memories else running
    if reset is not None:
        emptied = blocks.load(empty)
        start, running = choose(reset, (emptied, emptied), (start, running))
    if residuals is not None:
        blocks.store(residuals, start)
    keys, values = map(Memory, start, running)
    given = (block.gates, keys, values, options)
    new, read = packed.advance(block.tokens, block.ready, *given)
    blocks.store(after.running, new)
    packs.store_rows(y, read)
    blocks.store(after.start, choose(full, new, start))


def backward_kernel(
    x,
    running,
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
    step, last = pl.program_id(2), pl.num_programs(2) - 1

    def add(a, b):
        return jax.tree.map(jnp.add, a, b)

    @pl.when(step == 0)
    def _():
        d = blocks.load(d_after)
        if not layout.two_memories:
            # The chunk-start memory's gradient after a chunk that is not full waits in
            # `d_before` until that chunk is done.
            d = by_completeness(d, blocks.flags(x, layout)[0])
        blocks.store(d_before, d)
        blocks.store(
            d_empty, jax.tree.map(lambda ref: jnp.zeros(ref.shape, F32), d_empty)
        )

    block = blocks.read(x, layout, options)
    full, reset = blocks.flags(x, layout)
    start = blocks.load(residuals)
    entering = start
    if layout.two_memories:
        # `residuals` holds one memory a chunk; the running one of the first comes from
        # the caller. After it the two are equal, where there are tokens.
        given = blocks.load(running)
        if reset is not None:
            given = choose(reset, start, given)
        first = (step == last).astype(F32)
        entering = choose(first, given, start)
    d = Memories(blocks.load(d_before.start), blocks.load(d_before.running))
    if layout.two_memories:
        d = by_completeness(d, full)
    given_y = packs.load_rows(d_y, layout.group)
    keys, values = map(Memory, start, entering)
    given = (block.gates, keys, values, d.running, given_y, options)
    found = packed_gradient.vjp(block.tokens, block.ready, *given)
    d_start = add(d.start, (found.keys.start, found.values.start))
    d_running = found.keys.running, found.values.running
    if reset is not None:
        zeros = jax.tree.map(jnp.zeros_like, d_running)
        emptied = choose(reset, add(d_start, d_running), zeros)
        # Every reset reads `empty`, so that its gradient is a sum over chunks.
        blocks.store(d_empty, add(blocks.load(d_empty), emptied))
        d_start = choose(reset, zeros, d_start)
        d_running = choose(reset, zeros, d_running)
    if not layout.two_memories:
        d_start, d_running = (
            jax.tree.map(jnp.zeros_like, d_start),
            add(d_start, d_running),
        )
    blocks.store(d_before, Memories(d_start, d_running))
    for ref, d in zip(d_tokens, found.x, strict=True):
        packs.store_rows(ref, d)
    sums = (_from_sums(d, layout.heads) for d in found.total)
    rows = jnp.concatenate([*found.gamma, *sums], axis=1)
    d_gates[...] = rows.reshape(d_gates.shape)


def _from_sums(d: Array, heads: int) -> Array:
    """Cotangents of gates from those of their sums: sums from each token on."""
    width = d.shape[-1]
    token = jax.lax.broadcasted_iota(jnp.int32, (width, width), 0)
    before = packs.lane((width, width))
    start = before - packs.within((width, width), width // heads)
    later = (token >= before) & (token < start + width // heads)
    return _exact(d[:, 0], later.astype(F32), "nn")[:, None]


def by_completeness(d: Memories, full) -> Memories:
    """Cotangents of the memory at the start and of the new one, behind a chunk."""
    zeros = jax.tree.map(jnp.zeros_like, d.start)
    to_new, to_start = (choose(full, d.start, zeros), choose(full, zeros, d.start))
    return Memories(to_start, jax.tree.map(jnp.add, d.running, to_new))
