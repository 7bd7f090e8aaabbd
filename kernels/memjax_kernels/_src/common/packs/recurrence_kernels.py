"""The two kernels of a recurrence: a chunk of a group, forward and back.

Each takes references to blocks in VMEM. The memory and its cotangent are output blocks
that all chunks of a head share: they hold them between chunks.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from memjax_kernels._src.common import packs
from memjax_kernels._src.common.gate_sums import FORGETS_ALL, Sums
from memjax_kernels._src.common.packs import columns as pack_columns
from memjax_kernels._src.common.packs import decays as pack_decays
from memjax_kernels._src.common.packs.blocks import LANES
from memjax_kernels._src.common.products import Form, multiply, operand_dtype

F32 = jnp.float32


class Op(NamedTuple):
    """An op's equations for the kernels.

    Attributes:
        name: of its kernels, before "_forward" and "_backward".
        advance: (Chunk, memory) -> (memory, y).
        vjp: (Chunk, memory, their cotangents) -> Cotangents.
        in_xla: (q, k, v, g, beta, *rates, memory, chunk_size=) -> (memory, y), for
            gradients of gradients.
        exact: whether the backward kernel's memories are saved in float32, or in the
            tokens' dtype.
    """

    name: str
    advance: Callable[..., Any]
    vjp: Callable[..., Any]
    in_xla: Callable[..., Any]
    exact: bool


class Packing(NamedTuple):
    """Heads of a program.

    Attributes:
        group: packs of a program.
        heads: value heads of a pack.
        ways: value heads of a key head, which divide those of a program or are
            divided by them.
    """

    group: int
    heads: int
    ways: int

    @property
    def share(self) -> int:
        """Programs that read the same key head."""
        return max(1, self.ways // (self.group * self.heads))


class Static(NamedTuple):
    """Static arguments of the kernels."""

    op: Op
    packing: Packing
    interpret: Any


class Chunk(NamedTuple):
    """Tokens of one chunk, with a gate for each head.

    Attributes:
        q: queries.
        k: keys.
        v: values.
        heads: of a pack.
        row: sums of the gates along the lanes, [P, 1, CC].
        sums: (DD) -> the same along the sublanes, in DD lanes of all heads.
        beta: (DD) -> write rates, where there are any.
    """

    q: Float[Array, "P C KK"]
    k: Float[Array, "P C KK"]
    v: Float[Array, "P C VV"]
    heads: int
    row: Sums
    sums: Callable[[int], Sums]
    beta: Callable[[int], Float[Array, "P C DD"]]

    def between(self) -> Float[Array, "P C CC"]:
        """Decays from token j (lanes) to token i, 0 for j > i."""
        wide = self.sums(self.heads * self.q.shape[1])
        return pack_decays.decays_of(self.row, wide, self.heads).between

    def since(self, width: int) -> Float[Array, "P C DD"]:
        """Decays from the chunk's start."""
        coarse, fine = self.sums(width)
        return jnp.exp(coarse + fine)

    def until(self, width: int) -> Float[Array, "P C DD"]:
        """Decays to the chunk's end."""
        coarse, fine = self.sums(width)
        return jnp.exp((coarse[:, -1:] - coarse) + (fine[:, -1:] - fine))

    def whole(self, width: int) -> Float[Array, "P 1 DD"]:
        """The decay over the chunk."""
        coarse, fine = self.sums(width)
        return jnp.exp(coarse[:, -1:] + fine[:, -1:])


class Channels(NamedTuple):
    """Tokens of one chunk with a gate for each channel of keys or values.

    `beta` as in `Chunk`, unless there are `rates` of channels.
    """

    q: Float[Array, "P C KK"]
    k: Float[Array, "P C KK"]
    v: Float[Array, "P C VV"]
    g: Float[Array, "P C GG"]
    heads: int
    beta: Callable[[int], Float[Array, "P C DD"]]
    rates: tuple[Float[Array, "P C DD"], ...] = ()

    def cast(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """In the tokens' dtype, as operands of products are."""
        return x.astype(self.q.dtype)

    @property
    def parts(self) -> int:
        """Number of bfloat16 parts of a float32 that match these tokens' precision."""
        return 2 if self.q.dtype == jnp.bfloat16 else 3

    def dot(self, x: Array, y: Array, form: Form) -> Float[Array, "..."]:
        """A product of operands in the tokens' dtype, in float32."""
        return multiply(x, y, form, operand_dtype(self.q))


class Cotangents(NamedTuple):
    """Of the tokens and the memory.

    Attributes:
        tokens: of the queries, keys and values, and of gates and rates of channels.
        start: of the memory before the chunk.
        sums: of the sums of heads' gates, and at the last token that of the memory:
            parts to add, before the sum over a head's lanes.
        beta: of the rates, before the sum over a head's lanes.
    """

    tokens: tuple[Float[Array, "P C DD"], ...]
    start: Float[Array, "P K VV"]
    sums: tuple[Float[Array, "P C DD"], ...] = ()
    beta: Float[Array, "P C VV"] | None = None


def at_end(x: Float[Array, "P N D"], size: int) -> Float[Array, "P C D"]:
    """The sum over rows, in the row of the last of `size` tokens."""
    shape = (x.shape[0], size, x.shape[-1])
    last = packs.sublane(shape) == size - 1
    return jnp.where(last, packs.sum_slots(x), 0.0)


def forward_kernel(x, before, after, y, residuals, *, static: Static):
    """One chunk; with `residuals`, also saves the memory before it."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        after[...] = before[...]

    start = after[...]
    if residuals is not None:
        residuals[...] = start.astype(residuals.dtype)
    after[...], read = static.op.advance(_read(x, static), start)
    packs.store(y, read)


def backward_kernel(x, residuals, d_after, d_y, d_x, d_memory, *, static: Static):
    """Cotangents of one chunk, after those of the chunks behind it."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        d_memory[...] = d_after[...]

    group, heads, ways = static.packing
    start, given = residuals[...].astype(F32), packs.load(d_y, group)
    found = static.op.vjp(_read(x, static), start, d_memory[...], given)
    d_memory[...] = found.start

    # Gates clamped to the lowest have no gradient.
    def raised(g, d):
        return jnp.where(g > FORGETS_ALL, d, 0.0)

    d_q, d_k, d_v, *d_g = found.tokens
    if d_g:
        d_g[0] = raised(packs.load(x.tokens[3], group), d_g[0])
    for ref, value in zip(d_x.tokens[:2], (d_q, d_k), strict=True):
        packs.store_shared(ref, value, heads, ways)
    for ref, value in zip(d_x.tokens[2:], (d_v, *d_g), strict=True):
        packs.store(ref, value)
    if d_x.columns is None:
        return
    number = group * heads

    def column(part):
        shape = (1, part.shape[1], number)
        return pack_columns.sum_lanes(part, shape, group, heads)[0]

    # Parts of one width are added before the sum over lanes.
    by_width, columns = {}, []
    for part in found.sums:
        by_width[part.shape[-1]] = by_width.get(part.shape[-1], 0.0) + part
    if by_width:
        d_sums = functools.reduce(jnp.add, map(column, by_width.values()))
        d_sums = pack_decays.sum_back(d_sums)
        columns.append(raised(x.columns[:, :number], d_sums))
    if found.beta is not None:
        columns.append(column(found.beta))
    d_x.columns[...] = jnp.concatenate(columns, axis=1)


def _read(x: Any, static: Static) -> Chunk | Channels:
    group, heads, ways = static.packing
    q, k = (packs.load_shared(ref, group, heads, ways) for ref in x.tokens[:2])
    v, *gates = (packs.load(ref, group) for ref in x.tokens[2:])
    columns: list[Array] = []

    @functools.cache
    def in_lanes(index, width):
        # A head alone has what it needs in any number of lanes.
        lanes = max(width, LANES) if heads == 1 else width
        if lanes > width:
            return in_lanes(index, lanes)[..., :width]
        return pack_columns.spread(columns[index][None], width, group, heads)

    if x.columns is not None:
        columns.append(x.columns[...])
    beta = functools.partial(in_lanes, -1)
    if gates:
        # Of -inf, sums would be NaN.
        g = jnp.maximum(gates[0], FORGETS_ALL)
        return Channels(q, k, v, g, heads, beta, tuple(gates[1:]))
    number, given = group * heads, columns.pop()
    sums = pack_decays.sum_gates(given[:, :number])
    coarse, fine = jnp.split(sums, 2, axis=1)
    rows = pack_decays.transpose(sums)
    row = Sums(*(pack_decays.pack_heads(rows, i, group, heads) for i in (0, number)))

    columns += [coarse, fine, given[:, number:]]

    def sums_in_lanes(width):
        return Sums(in_lanes(0, width), in_lanes(1, width))

    return Chunk(q, k, v, heads, row, sums_in_lanes, beta)
