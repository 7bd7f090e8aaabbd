"""The two kernels of Trellis for chunks of at most 8 tokens: a block of 16 tokens.

Each takes references to blocks in VMEM. `after` and `d_before` are output blocks that
all blocks of a head share: they hold the memories, or their cotangents, between blocks.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from memjax_kernels.common import packs
from memjax_kernels.common.packs import decays as pack_decays
from memjax_kernels.common.packs.blocks import ROWS
from memjax_kernels.trellis.chunk import Options
from memjax_kernels.trellis.packed import Memory
from memjax_kernels.trellis.state import Memories
from memjax_kernels.trellis.tpu_packed_blocks import Layout, load, store
from memjax_kernels.trellis.tpu_packed_kernels import by_completeness, choose
from memjax_kernels.trellis.tpu_small.equations import (
    Decays,
    Part,
    Rules,
    advance,
    pull_back,
    rewrite,
)

F32 = jnp.float32


class Rows(NamedTuple):
    """Room for the cotangents of a block's tokens, each [parts, P, C, .]."""

    q: Any
    k: Any
    v: Any
    alpha: Any


def forward_kernel(
    x,
    before,
    empty,
    after,
    y,
    kept,
    parts: Part,
    reads,
    *,
    layout: Layout,
    options: Options,
):
    """One block; `kept` None does not keep the memories before it."""
    index, last = pl.program_id(2), pl.num_programs(2) - 1
    rules = Rules(options, layout.heads, layout.size)

    @pl.when(index == 0)
    def _():
        # Later blocks find what the one before left: all share this output block.
        store(after, load(before))

    _unpack(x, parts, layout)
    if kept is not None:
        store(kept, load(after.start if layout.apart else after.running))

    def chunk(part, _):
        complete, cleared = _flags(x, layout, part)
        running = load(after.running)
        start = load(after.start) if layout.apart else running
        if cleared is not None:
            fresh = load(empty)
            start, running = choose(cleared, (fresh, fresh), (start, running))
        keys, values = map(Memory, start, running)
        new, reads[part] = advance(_part(parts, part), keys, values, rules)
        store(after.running, new)
        # Where the two are equal between chunks, the last chunk's is put right below.
        store(after.start, choose(complete, new, start) if layout.apart else start)

    jax.lax.fori_loop(0, layout.parts, chunk, None)
    packs.store_rows(y, _whole(reads))
    if not layout.apart:

        @pl.when(index == last)
        def _():
            complete = _flags(x, layout, layout.parts - 1)[0]
            new = choose(complete, load(after.running), load(after.start))
            store(after.start, new)


def backward_kernel(
    x,
    running,
    empty,
    kept,
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
    zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)
    outer = lambda left, right: rules.dot(left, right, "tn")
    stack = lambda *rows: jnp.concatenate(rows, axis=1)
    of_start = lambda d: outer(*d.start)
    of_running = lambda d: d.decayed + outer(*d.running)
    # Of one memory that is both: one product.
    of_both = lambda d: d.decayed + outer(*map(stack, d.start, d.running))

    @pl.when(step == 0)
    def _():
        d = load(d_after)
        if not layout.apart:
            # What the memory at the start receives behind an incomplete chunk waits in
            # `d_before` until that chunk is done.
            d = by_completeness(d, _flags(x, layout, layout.parts - 1)[0])
        store(d_before, d)
        store(d_empty, jax.tree.map(lambda ref: jnp.zeros(ref.shape, F32), d_empty))

    _unpack(x, parts, layout)
    _split(d_reads, packs.load_rows(d_y, layout.group), layout)
    d_gates[...] = jnp.zeros(d_gates.shape, F32)
    _write_memories(memories, 0, load(kept))

    def begin(part):
        """The memories that a chunk finds, and its flags."""
        complete, cleared = _flags(x, layout, part)
        start = tuple(ref[part] for ref in memories)
        begun = start
        if layout.apart:
            # The running memory of the first chunk comes from the caller. After it the
            # two are equal, where there are tokens.
            first = ((step == last) & (part == 0)).astype(F32)
            begun = choose(first, load(running), start)
        if cleared is not None:
            fresh = load(empty)
            start, begun = choose(cleared, (fresh, fresh), (start, begun))
        return start, begun, complete, cleared

    def recompute(part, _):
        start, begun, complete, _ = begin(part)
        tokens, (keys, values) = _part(parts, part), map(Memory, start, begun)
        new = rewrite(tokens, keys, values, rules)
        if layout.apart:
            new = choose(complete, new, start)
        _write_memories(memories, part + 1, new)

    def keep_rest(d, cleared):
        """Cotangents of what a chunk finds; `empty` has those of cleared memories."""
        if cleared is None:
            return d
        # Every reset reads `empty`, so that its gradient is a sum over chunks.
        fresh = choose(cleared, d, zeros(d))
        store(d_empty, jax.tree.map(jnp.add, load(d_empty), fresh))
        return choose(cleared, zeros(d), d)

    def back(i, _):
        part = layout.parts - 1 - i
        start, begun, complete, cleared = begin(part)
        d_start, d_running = None, load(d_before.running)
        if layout.apart:
            d = Memories(load(d_before.start), d_running)
            d_start, d_running = by_completeness(d, complete)
        keys, values = map(Memory, start, begun)
        given = (keys, values, d_running, d_reads[part], rules)
        found = pull_back(_part(parts, part), *given)
        passes = found.keys, found.values
        if layout.apart:
            d_start = jax.tree.map(jnp.add, d_start, tuple(map(of_start, passes)))
            d_start = keep_rest(d_start, cleared)
            d_running = keep_rest(tuple(map(of_running, passes)), cleared)
            store(d_before, Memories(d_start, d_running))
        else:
            # What waits for the memory at the last chunk's start is added there. It is
            # cleared in the end: a `pl.when` here would cut the loop in two.
            waiting = load(d_before.start)
            flag = ((step == 0) & (i == 0)).astype(F32)
            waiting = choose(flag, waiting, zeros(waiting))
            d = jax.tree.map(jnp.add, tuple(map(of_both, passes)), waiting)
            store(d_before.running, keep_rest(d, cleared))

        for ref, d_x in zip(d_parts, found[:4], strict=True):
            ref[part] = d_x
        gammas, sums = found.numbers[:2], found.numbers[2:]
        rows = [_row(d, part, layout) for d in gammas]
        rows += [_row(d, part, layout, later=True) for d in sums]
        d_gates[...] += jnp.concatenate(rows, axis=1).reshape(d_gates.shape)

    jax.lax.fori_loop(0, layout.parts - 1, recompute, None)
    jax.lax.fori_loop(0, layout.parts, back, None)
    if not layout.apart:

        @pl.when(step == last)
        def _():
            store(d_before.start, zeros(load(d_before.start)))

    for ref, d_x in zip(d_tokens, d_parts, strict=True):
        packs.store_rows(ref, _whole(d_x))


def _write_memories(memories, part, new) -> None:
    for ref, x in zip(memories, new, strict=True):
        ref[part] = x


def _part(parts: Part, part) -> Part:
    return jax.tree.map(lambda ref: ref[part], parts)


def _whole(ref) -> Array:
    """All parts of a block, [P, 16, .]."""
    return jnp.concatenate([ref[part] for part in range(ref.shape[0])], axis=1)


def _split(ref, x: Array, layout: Layout) -> None:
    """Writes a block's tokens [P, 16, .] as those of its parts, in float32."""
    for part in range(layout.parts):
        ref[part] = _of_part(x, part, layout).astype(F32)


def _of_part(x: Array, part: int, layout: Layout) -> Array:
    return x[:, part * layout.size : (part + 1) * layout.size]


def _flags(x, layout: Layout, part):
    """Whether a chunk is complete, and cleared: [P, 1, 1]."""

    def flag(index):
        first = x.gates.shape[2] - 1 - layout.resets
        column = first + index
        row = part * layout.size
        found = x.gates[:, pl.ds(row, 1), column : column + 1][:, None]
        return packs.each_pack(
            jnp.broadcast_to(found, (layout.rows, layout.group, 1, 1))
        )

    return flag(0), flag(1) if layout.resets else None


def _unpack(x, parts: Part, layout: Layout) -> None:
    """Writes tokens and gates of a block as those of its parts."""
    heads = layout.heads
    q, k, v, alpha = (packs.load_rows(ref, layout.group) for ref in x.tokens)
    slots = alpha.shape[-1] // heads
    for ref, tokens in zip(parts[:3], (q, k, v), strict=True):
        tokens = tokens.astype(F32)
        for part in range(layout.parts):
            ref[part] = packs.diagonal(_of_part(tokens, part, layout), heads)
    alpha = alpha.astype(F32)
    by_head = [alpha[:, :, i * slots : (i + 1) * slots] for i in range(heads)]
    _stack(parts.target, by_head, layout)
    each = heads * layout.group
    gammas = x.gates[:, :, : each * layout.gammas]
    g = x.gates[:, :, each * layout.gammas : each * (layout.gammas + layout.gates)]
    for i, ref in enumerate(parts.gammas):
        _stack(ref, _columns(gammas, i * each, slots, layout), layout)
    sums = jnp.stack([pack_decays.sum_gates(row, layout.size) for row in g])
    for i, ref in enumerate(parts.decays):
        starts = i * each, (layout.gates + i) * each
        of_sums = [_columns(sums, at, slots, layout) for at in starts]
        _decay(ref, of_sums, layout)


def _decay(refs: Decays, of_sums: list[list[Array]], layout: Layout) -> None:
    """Writes what gates leave, from the coarse and fine parts of their sums."""
    size, heads = layout.size, layout.heads
    for part in range(layout.parts):
        sums = [_below(x, part, layout) for x in of_sums]
        refs.kept[part] = jnp.exp(sums[0] + sums[1])
        if size == 1:
            # A token is its chunk's end, and sees no other.
            continue
        refs.until[part] = jnp.exp(sum(_ends(x, layout) - x for x in sums))
        rows = size * heads
        shape = (sums[0].shape[0], rows, rows)
        row, lane = packs.sublane(shape), packs.lane(shape)
        of = lambda x: jax.lax.div(x, jnp.int32(size))
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


def _row(column: Array, part, layout: Layout, later: bool = False) -> Array:
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
