"""The two kernels of Trellis for packs of heads: a chunk of a group, forward and back.

Each takes references to blocks in VMEM. `after` and `d_before` are output blocks that
all chunks of a head share: they hold the memories, or their cotangents, between chunks.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from memjax_kernels.common import packs, products
from memjax_kernels.common.packs import decays as pack_decays
from memjax_kernels.trellis import packed, packed_gradient
from memjax_kernels.trellis.chunk import Options
from memjax_kernels.trellis.packed import Chunk, Gates, Memory
from memjax_kernels.trellis.state import Memories

F32 = jnp.float32
# Of gates, which tokens in bfloat16 do not round.
_exact = functools.partial(products.multiply, dtype=jnp.dtype(F32))


class Layout(NamedTuple):
    """What the blocks of a program hold.

    Attributes:
        group: packs.
        heads: of a pack.
        gammas: 2 where each pass has its own, else 1.
        gates: likewise.
        apart: whether a chunk may find two memories that differ; else they do so after
            the last chunk alone.
        resets: whether there is a flag of chunks that start from `empty`.
    """

    group: int
    heads: int
    gammas: int
    gates: int
    apart: bool
    resets: bool


class _Block(NamedTuple):
    """A chunk of a group; flags are float32 [1, 1]."""

    chunk: Chunk
    gates: tuple[Gates, Gates]
    complete: Array
    cleared: Array | None


def _read(x, layout: Layout) -> _Block:
    """The chunk of references to `tpu_packed.Blocks`."""
    group = layout.group
    block = x.gates[...]
    flags = block[:1, layout.heads * group * (layout.gammas + layout.gates) :]
    chunk = Chunk(*(packs.load(ref, group) for ref in x.tokens))
    cleared = flags[:, 1:2] if layout.resets else None
    return _Block(chunk, _gates(block, layout), flags[:, :1], cleared)


def _gates(block: Array, layout: Layout) -> tuple[Gates, Gates]:
    """Gates of both passes, of a block [C, R] of gammas, gates and flags."""
    group, heads = layout.group, layout.heads
    each = heads * group
    gammas = block[:, : each * layout.gammas]
    g = block[:, gammas.shape[1] :][:, : each * layout.gates]
    columns = jnp.concatenate([gammas, pack_decays.sum_gates(g)], axis=1)
    rows = pack_decays.transpose(columns)

    def total(index):
        coarse = each * (layout.gammas + index)
        fine = coarse + each * layout.gates
        return pack_decays.total(columns, rows, (coarse, fine), group, heads)

    totals = [total(index) for index in range(layout.gates)]
    steps = [
        pack_decays.side_by_side(rows, each * index, group, heads)
        for index in range(layout.gammas)
    ]
    return Gates(steps[0], totals[0]), Gates(steps[-1], totals[-1])


def _load(refs):
    return jax.tree.map(lambda ref: ref[...].astype(F32), refs)


def _store(refs, values):
    jax.tree.map(lambda ref, x: ref.__setitem__(..., x.astype(ref.dtype)), refs, values)


def _choose(flag, new, old):
    """`new` where the flag is 1."""
    return jax.tree.map(lambda a, b: jnp.where(flag > 0.5, a, b), new, old)


def forward_kernel(
    x, before, empty, after, y, kept, *, layout: Layout, options: Options
):
    """One chunk; `kept` None does not keep the memories before it."""
    index, last = pl.program_id(2), pl.num_programs(2) - 1

    @pl.when(index == 0)
    def _():
        # Later chunks find what the one before left: all share this output block.
        _store(after, _load(before))

    block = _read(x, layout)
    running = _load(after.running)
    start = _load(after.start) if layout.apart else running
    if block.cleared is not None:
        fresh = _load(empty)
        start, running = _choose(block.cleared, (fresh, fresh), (start, running))
    if kept is not None:
        _store(kept, start)
    keys, values = map(Memory, start, running)
    new, read = packed.advance(block.chunk, block.gates, keys, values, options)
    _store(after.running, new)
    packs.store(y, read)

    def end():
        _store(after.start, _choose(block.complete, new, start))

    if layout.apart:
        end()
    else:
        # Between chunks the two are equal, and one is enough.
        pl.when(index == last)(end)


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
    *,
    layout: Layout,
    options: Options,
):
    """Cotangents of one chunk, after those of the chunks behind it."""
    step, last = pl.program_id(2), pl.num_programs(2) - 1
    block = _read(x, layout)
    add = lambda a, b: jax.tree.map(jnp.add, a, b)

    @pl.when(step == 0)
    def _():
        d = _load(d_after)
        if not layout.apart:
            # What the memory at the start receives behind an incomplete chunk waits in
            # `d_before` until that chunk is done.
            d = _by_completeness(d, block.complete)
        _store(d_before, d)
        _store(d_empty, jax.tree.map(lambda ref: jnp.zeros(ref.shape, F32), d_empty))

    start = _load(kept)
    begun = start
    if layout.apart:
        # `kept` holds one memory a chunk; the running one of the first comes from the
        # caller. After it the two are equal, where there are tokens.
        given = _load(running)
        if block.cleared is not None:
            given = _choose(block.cleared, start, given)
        first = (step == last).astype(F32)
        begun = _choose(first, given, start)
    d = Memories(_load(d_before.start), _load(d_before.running))
    if layout.apart:
        d = _by_completeness(d, block.complete)
    given_y = packs.load(d_y, layout.group)
    keys, values = map(Memory, start, begun)
    found = packed_gradient.pull_back(
        block.chunk, block.gates, keys, values, d.running, given_y, options
    )
    d_start = add(d.start, (found.keys.start, found.values.start))
    d_running = found.keys.running, found.values.running
    if block.cleared is not None:
        zeros = jax.tree.map(jnp.zeros_like, d_running)
        fresh = _choose(block.cleared, add(d_start, d_running), zeros)
        # Every reset reads `empty`, so that its gradient is a sum over chunks.
        _store(d_empty, add(_load(d_empty), fresh))
        d_start = _choose(block.cleared, zeros, d_start)
        d_running = _choose(block.cleared, zeros, d_running)
    if not layout.apart:
        d_start, d_running = (
            jax.tree.map(jnp.zeros_like, d_start),
            add(d_start, d_running),
        )
    _store(d_before, Memories(d_start, d_running))
    jax.tree.map(packs.store, tuple(d_tokens), tuple(found.x))
    d_gates[...] = jnp.concatenate(
        [*found.gamma, *(_from_sums(d, layout.heads) for d in found.total)], axis=1
    )


def _from_sums(d: Array, heads: int) -> Array:
    """Cotangents of gates from those of their sums: sums from each token on."""
    width = d.shape[-1]
    token = jax.lax.broadcasted_iota(jnp.int32, (width, width), 0)
    before = packs.lane((width, width))
    start = before - packs.within((width, width), width // heads)
    later = (token >= before) & (token < start + width // heads)
    return _exact(d[:, 0], later.astype(F32), "nn")[:, None]


def _by_completeness(d: Memories, complete) -> Memories:
    """Cotangents of the memory at the start and of the new one, behind a chunk."""
    zeros = jax.tree.map(jnp.zeros_like, d.start)
    to_new, to_start = (
        _choose(complete, d.start, zeros),
        _choose(complete, zeros, d.start),
    )
    return Memories(to_start, jax.tree.map(jnp.add, d.running, to_new))
