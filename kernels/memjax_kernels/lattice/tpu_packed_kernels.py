"""The two kernels of Lattice for packs of heads: a chunk of a group, forward and back.

Each takes references to blocks in VMEM. `memory` and its cotangents are output blocks
that all chunks of a head share: they hold them between chunks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from memjax_kernels.common import packs
from memjax_kernels.lattice import packed, packed_gradient
from memjax_kernels.lattice.packed import Chunk, Options

F32 = jnp.float32


class Layout(NamedTuple):
    """What the blocks of a program hold.

    Attributes:
        group: packs.
        heads: of a pack.
        resets: whether there is a flag of chunks that start from `empty`.
    """

    group: int
    heads: int
    resets: bool


class _Block(NamedTuple):
    """A chunk of a group; flags are float32 [1, 1]."""

    chunk: Chunk
    complete: Array
    cleared: Array | None


def forward_kernel(
    x, before, empty, memory, y, kept, *, layout: Layout, options: Options
):
    """One chunk; `kept` None does not keep the memory before it."""
    after, pending = memory

    @pl.when(pl.program_id(2) == 0)
    def _():
        after[...] = before[...]
        # Chunks of a kernel start with nothing pending: see `segment`.
        pending[...] = jnp.zeros(pending.shape, F32)

    block = _read(x, layout)
    start = _begin(block, after[...], empty)
    if kept is not None:
        kept[...] = start.astype(kept.dtype)
    moved, read = packed.advance(block.chunk, start, options)
    after[...] = _choose(block.complete, moved.after, start)
    left = pending[...] + moved.written
    pending[...] = _choose(block.complete, jnp.zeros_like(left), left)
    packs.store(y, read)


def backward_kernel(
    x,
    empty,
    kept,
    d_memory,
    d_y,
    d_tokens,
    d_gates,
    d_start,
    d_empty,
    d_pending,
    *,
    layout: Layout,
    options: Options,
):
    """Cotangents of one chunk, after those of the chunks behind it."""
    d_after, d_left = d_memory

    @pl.when(pl.program_id(2) == 0)
    def _():
        d_start[...], d_pending[...] = d_after[...], d_left[...]
        d_empty[...] = jnp.zeros(d_empty.shape, F32)

    block = _read(x, layout)
    d_whole, d_open = d_start[...], d_pending[...]
    zeros = jnp.zeros_like(d_whole)
    d_new = _choose(block.complete, d_whole, zeros)
    # What is pending is only added to, and dropped where a chunk is complete.
    d_open = _choose(block.complete, zeros, d_open)
    found = packed_gradient.pull_back(
        block.chunk,
        kept[...].astype(F32),
        *(d_new, d_open, packs.load(d_y, layout.group)),
        options,
    )
    d = found.start + (d_whole - d_new)
    if block.cleared is not None:
        # Every reset reads `empty`, so that its gradient is a sum over chunks.
        d_empty[...] += _choose(block.cleared, d, zeros)
        d = _choose(block.cleared, zeros, d)
    d_start[...], d_pending[...] = d, d_open
    for ref, value in zip(d_tokens, found.x[:3], strict=True):
        packs.store(ref, value)
    d_gates[...] = _sum_slots(found.x.gamma, d_gates.shape[-1], layout)


def _read(x, layout: Layout) -> _Block:
    """The chunk of references to `tpu_packed.Blocks`."""
    gates = x.gates[...]
    flags = gates[:1, layout.heads * layout.group :]
    q, k, v = (packs.load(ref, layout.group) for ref in x.tokens)
    gamma = _spread(gates, q.shape[-1], layout)
    cleared = flags[:, 1:2] if layout.resets else None
    return _Block(Chunk(q, k, v, gamma), flags[:, :1], cleared)


def _begin(block: _Block, start: Array, empty) -> Array:
    if block.cleared is None:
        return start
    return _choose(block.cleared, empty[...], start)


def _choose(flag, new, old):
    """`new` where the flag is 1."""
    return jnp.where(flag > 0.5, new, old)


def _spread(
    gates: Float[Array, "C R"], width: int, layout: Layout
) -> Float[Array, "P C MM"]:
    """Each head's column in all of the head's lanes: a product with ones."""
    ones = _columns((gates.shape[1], layout.group * width), 0, width, layout)
    wide = sum(_product(part, ones) for part in packs.in_bfloat16(gates))
    parts = [wide[:, i * width : (i + 1) * width] for i in range(layout.group)]
    return jnp.stack(parts)


def _sum_slots(
    x: Float[Array, "P C MM"], columns: int, layout: Layout
) -> Float[Array, "C R"]:
    """Sums over each head's lanes, as columns; undoes `_spread`."""
    width = x.shape[-1]
    ones = _columns((layout.group * width, columns), 1, width, layout)
    wide = jnp.concatenate([*x], axis=-1)
    return sum(_product(part, ones) for part in packs.in_bfloat16(wide))


def _product(x, y):
    # Exact in bfloat16, as all that is multiplied is a part in bfloat16 and a one.
    return jax.lax.dot(x, y, preferred_element_type=F32)


def _columns(shape, axis: int, width: int, layout: Layout):
    """1 where a column along `axis` is that of a lane's head, [., .]."""
    column = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1 - axis)
    pack, within = jax.lax.div(lane, width), jax.lax.rem(lane, width)
    head = jax.lax.div(within, width // layout.heads)
    return (column == head * layout.group + pack).astype(F32).astype(jnp.bfloat16)
