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
from memjax_kernels._src.trellis.chunk import Options
from memjax_kernels._src.trellis.packed import Memory
from memjax_kernels._src.trellis.state import Memories
from memjax_kernels._src.trellis.tpu_packed_blocks import Layout, load, store
from memjax_kernels._src.trellis.tpu_packed_kernels import by_completeness, choose
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
    index, last = pl.program_id(2), pl.num_programs(2) - 1
    rules = Rules(options, layout.heads, layout.size)

    @pl.when(index == 0)
    def _():
        # Later blocks find what the one before left: all share this output block.
        store(after, load(before))

    unpack(x, parts, layout)
    if residuals is not None:
        store(residuals, load(after.start if layout.two_memories else after.running))

    def chunk(part, _):
        full, reset = flags(x, layout, part)
        running = load(after.running)
        start = load(after.start) if layout.two_memories else running
        if reset is not None:
            emptied = load(empty)
            start, running = choose(reset, (emptied, emptied), (start, running))
        keys, values = map(Memory, start, running)
        new, reads[part] = advance(_part(parts, part), keys, values, rules)
        store(after.running, new)
        # Where the two are equal between chunks, the last chunk's is put right below.
        store(after.start, choose(full, new, start) if layout.two_memories else start)

    jax.lax.fori_loop(0, layout.parts, chunk, None)
    packs.store_rows(y, whole(reads))
    if not layout.two_memories:

        @pl.when(index == last)
        def _():
            full = flags(x, layout, layout.parts - 1)[0]
            new = choose(full, load(after.running), load(after.start))
            store(after.start, new)


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
    parts: Part,
    d_reads,
    d_parts: Rows,
    memories: tuple[Any, Any],
    *,
    layout: Layout,
    options: Options,
):
    """Cotangents of one block, after those of the blocks behind it."""
    step, last = pl.program_id(2), pl.num_programs(2) - 1
    rules = Rules(options, layout.heads, layout.size)
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)

    def outer(left, right):
        return rules.dot(left, right, "tn")

    def of_start(d):
        return outer(*d.start)

    def of_running(d):
        return d.decayed + outer(*d.running)

    # Of one memory that is both: one product.
    def of_both(d):
        return d.decayed + outer(
            *map(lambda *rows: jnp.concatenate(rows, axis=1), d.start, d.running)
        )

    @pl.when(step == 0)
    def _():
        d = load(d_after)
        if not layout.two_memories:
            # The chunk-start memory's gradient after a chunk that is not full waits in
            # `d_before` until that chunk is done.
            d = by_completeness(d, flags(x, layout, layout.parts - 1)[0])
        store(d_before, d)
        store(d_empty, jax.tree.map(lambda ref: jnp.zeros(ref.shape, F32), d_empty))

    unpack(x, parts, layout)
    split(d_reads, packs.load_rows(d_y, layout.group), layout)
    d_gates[...] = jnp.zeros(d_gates.shape, F32)
    _write_memories(memories, 0, load(residuals))

    def begin(part):
        """The memories that a chunk finds, and its flags."""
        full, reset = flags(x, layout, part)
        start = tuple(ref[part] for ref in memories)
        entering = start
        if layout.two_memories:
            # The running memory of the first chunk comes from the caller. After it the
            # two are equal, where there are tokens.
            first = ((step == last) & (part == 0)).astype(F32)
            entering = choose(first, load(running), start)
        if reset is not None:
            emptied = load(empty)
            start, entering = choose(reset, (emptied, emptied), (start, entering))
        return start, entering, full, reset

    def recompute(part, _):
        start, entering, full, _ = begin(part)
        tokens, (keys, values) = _part(parts, part), map(Memory, start, entering)
        new = rewrite(tokens, keys, values, rules)
        if layout.two_memories:
            new = choose(full, new, start)
        _write_memories(memories, part + 1, new)

    def keep_rest(d, reset):
        """Cotangents before a chunk; after a reset they go to `empty`."""
        if reset is None:
            return d
        # Every reset reads `empty`, so that its gradient is a sum over chunks.
        emptied = choose(reset, d, zeros(d))
        store(d_empty, jax.tree.map(jnp.add, load(d_empty), emptied))
        return choose(reset, zeros(d), d)

    def back(i, _):
        part = layout.parts - 1 - i
        start, entering, full, reset = begin(part)
        d_start, d_running = None, load(d_before.running)
        if layout.two_memories:
            d = Memories(load(d_before.start), d_running)
            d_start, d_running = by_completeness(d, full)
        keys, values = map(Memory, start, entering)
        given = (keys, values, d_running, d_reads[part], rules)
        found = vjp(_part(parts, part), *given)
        passes = found.keys, found.values
        if layout.two_memories:
            d_start = jax.tree.map(jnp.add, d_start, tuple(map(of_start, passes)))
            d_start = keep_rest(d_start, reset)
            d_running = keep_rest(tuple(map(of_running, passes)), reset)
            store(d_before, Memories(d_start, d_running))
        else:
            # The pending gradient of the last chunk-start memory is added there. It is
            # set to zero in the end: a `pl.when` here would cut the loop in two.
            waiting = load(d_before.start)
            flag = ((step == 0) & (i == 0)).astype(F32)
            waiting = choose(flag, waiting, zeros(waiting))
            d = jax.tree.map(jnp.add, tuple(map(of_both, passes)), waiting)
            store(d_before.running, keep_rest(d, reset))

        for ref, d_x in zip(d_parts, found[:4], strict=True):
            ref[part] = d_x
        gammas, sums = found.numbers[:2], found.numbers[2:]
        rows = [row(d, part, layout) for d in gammas]
        rows += [row(d, part, layout, later=True) for d in sums]
        d_gates[...] += jnp.concatenate(rows, axis=1).reshape(d_gates.shape)

    jax.lax.fori_loop(0, layout.parts - 1, recompute, None)
    jax.lax.fori_loop(0, layout.parts, back, None)
    if not layout.two_memories:

        @pl.when(step == last)
        def _():
            store(d_before.start, zeros(load(d_before.start)))

    for ref, d_x in zip(d_tokens, d_parts, strict=True):
        packs.store_rows(ref, whole(d_x))


def _write_memories(memories, part, new) -> None:
    for ref, x in zip(memories, new, strict=True):
        ref[part] = x


def _part(parts: Part, part) -> Part:
    return jax.tree.map(lambda ref: ref[part], parts)
