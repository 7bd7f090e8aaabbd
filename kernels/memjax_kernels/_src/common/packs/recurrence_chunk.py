"""A chunk of a recurrence as its equations take it, with gates in all lanes of a head.

A program has the packs of one batch element. Gates are of heads, as columns, or of
channels, as tokens are. Those of channels may come as logits z:

    g = -exp(log_rate) softplus(z + bias)

The rows of bias and log_rate are a second memory, which no chunk changes: so their
cotangents are summed over chunks as the memory's are carried.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import packs
from memjax_kernels._src.common.gate_sums import FORGETS_ALL, Sums
from memjax_kernels._src.common.packs import channels as pack_channels
from memjax_kernels._src.common.packs import columns as pack_columns
from memjax_kernels._src.common.packs import decays as pack_decays
from memjax_kernels._src.common.packs.blocks import LANES
from memjax_kernels._src.common.packs.chunk_kernels import Cotangents, Equations
from memjax_kernels._src.common.packs.layout import Layout
from memjax_kernels._src.common.packs.staggered import Phases
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
        mild: whether the equations have a form for chunks that forget little.
    """

    name: str
    advance: Callable[..., Any]
    vjp: Callable[..., Any]
    in_xla: Callable[..., Any]
    exact: bool
    mild: bool = False


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
        return pack_decays.decays(self.row, wide, self.heads).between

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

    `beta` as in `Chunk`, unless there are `rates` of channels. A `mild` chunk forgets
    little: decays between tokens are quotients.
    """

    q: Float[Array, "P C KK"]
    k: Float[Array, "P C KK"]
    v: Float[Array, "P C VV"]
    g: Float[Array, "P C GG"]
    heads: int
    beta: Callable[[int], Float[Array, "P C DD"]]
    rates: tuple[Float[Array, "P C DD"], ...] = ()
    mild: bool = False

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


class LogGates(NamedTuple):
    """Gates of channels by logits, and the log of softplus' slope; both float32."""

    g: Float[Array, "P C GG"]
    slope: Float[Array, "P C GG"]


class Gates(NamedTuple):
    """Cotangents of gates and rates of heads, before the sum over a head's lanes.

    Attributes:
        sums: parts to add, of the sums of gates; at the last token that of the memory.
        beta: of the rates.
    """

    sums: tuple[Float[Array, "P C DD"], ...] = ()
    beta: Float[Array, "P C VV"] | None = None


def at_end(x: Float[Array, "P N D"], size: int) -> Float[Array, "P C D"]:
    """The sum over rows, in the row of the last of `size` tokens."""
    shape = (x.shape[0], size, x.shape[-1])
    last = packs.sublane(shape) == size - 1
    return jnp.where(last, packs.sum_slots(x), 0.0)


def equations(op: Op) -> Equations:
    """The equations of an op as the kernels take them, of one phase."""

    def vjp(chunk, *given) -> Cotangents:
        found = op.vjp(chunk, *given)
        if not isinstance(chunk, Channels):
            return found
        q, k, v, g, *rates = found.tokens
        return found._replace(tokens=(q, k, v, _raised(chunk.g, g), *rates))

    found = Equations(_at_once(op.advance), _at_once(vjp), read=_read, gates=_gates)
    if not op.mild:
        return found

    def read(x, layout):
        return _read(x, layout)._replace(mild=True)

    return found._replace(mild=(forgets_little, found._replace(read=read)))


def log_gates(logits: Array, rows: Float[Array, "*B 2 DD"]) -> tuple[Array, Array]:
    """Gates, -inf too, and the log of softplus' slope; rows are bias and log_rate."""
    bias, log_rate = jnp.split(rows, 2, axis=-2)
    z = logits.astype(F32) + bias
    rest = jnp.log1p(jnp.exp(-jnp.abs(z)))
    # The log keeps the digits of a slope near 0, of gates that forget little.
    return -jnp.exp(log_rate) * (jnp.maximum(z, 0.0) + rest), jnp.minimum(z, 0.0) - rest


def of_logits(given: Equations) -> Equations:
    """The same where gates are logits and the memory is (S, rows)."""

    def prepare(x, memory, layout):
        q, k, v, ref, *rates = x.tokens
        rows = packs.each_pack(memory[1][...])
        ready = LogGates(*log_gates(packs.load_rows(ref, layout.group), rows))
        return x._replace(tokens=(q, k, v, ready, *rates))

    def read(x, layout):
        return given.read(x, layout), x.tokens[3].slope

    def advance(both, memory):
        (chunk, _), (start, rows) = both, memory
        new, y = yield from given.advance(chunk, start)
        return (new, rows), y

    def vjp(both, memory, d_after, d_y):
        (chunk, slope), (start, rows), (d_new, d_rows) = both, memory, d_after
        found = yield from given.vjp(chunk, start, d_new, d_y)
        q, k, v, d_g, *rates = found.tokens
        d_z = -d_g * jnp.exp(slope + rows[:, 1:])
        sums = [packs.sum_slots(d) for d in (d_z, d_g * chunk.g)]
        d_memory = found.memory, d_rows + jnp.concatenate(sums, axis=1)
        return found._replace(tokens=(q, k, v, d_z, *rates), memory=d_memory)

    found = given._replace(prepare=prepare, read=read, advance=advance, vjp=vjp)
    if given.mild is not None:
        predicate, mild = given.mild
        found = found._replace(mild=(predicate, of_logits(mild)))
    return found


def forgets_little(x: Any) -> Bool[Array, ""] | None:
    """Whether the log decay summed over a quarter of a chunk is above -MILD everywhere.

    Gates are rounded to bfloat16. None for float32, of which quotients would lose a
    digit.
    """
    q, _, _, gates, *_ = x.tokens
    if q.dtype == F32:
        return None
    if isinstance(gates, LogGates):
        gates = jnp.concatenate(list(gates.g), axis=-1)
    size, width = gates.shape[-2:]
    shape = (1, pack_channels.BLOCK, size)
    begin, token = packs.sublane(shape) * (size // 4), packs.lane(shape)
    quarters = (begin <= token) & (token < begin + size // 4)
    g = jnp.abs(gates[...]).reshape(1, size, width)
    sums = multiply(quarters.astype(F32), g, "nn", jnp.dtype(jnp.bfloat16))
    # Not by a maximum, in which NaN might be lost.
    return jnp.all(sums < pack_channels.MILD)


def _at_once(function: Callable[..., Any]) -> Callable[..., Phases]:
    def phases(*given):
        yield
        return function(*given)

    return phases


def _raised(g: Float[Array, "..."], d: Float[Array, "..."]) -> Float[Array, "..."]:
    """Gates clamped to the lowest have no gradient."""
    return jnp.where(g > FORGETS_ALL, d, 0.0)


def _gates(found: Gates, x: Any, layout: Layout) -> Float[Array, "1 C R"]:
    """Columns of the cotangents of gates, and behind them of rates."""
    number = layout.group * layout.heads

    def column(part):
        shape = (1, part.shape[1], number)
        return pack_columns.sum_lanes(part, shape, *layout.of_row)[0]

    # Parts of one width are added before the sum over lanes.
    by_width, columns = {}, []
    for part in found.sums:
        by_width[part.shape[-1]] = by_width.get(part.shape[-1], 0.0) + part
    if by_width:
        d_sums = functools.reduce(jnp.add, map(column, by_width.values()))
        d_sums = pack_decays.sum_back(d_sums)
        columns.append(_raised(x.gates[0, :, :number], d_sums))
    if found.beta is not None:
        columns.append(column(found.beta))
    return jnp.concatenate(columns, axis=1)[None]


def _read(x: Any, layout: Layout) -> Chunk | Channels:
    group, heads = layout.of_row
    q, k = (packs.load_rows(ref, group, heads, layout.ways) for ref in x.tokens[:2])
    v, *gates = (
        ref.g if isinstance(ref, LogGates) else packs.load_rows(ref, group)
        for ref in x.tokens[2:]
    )
    columns: list[Array] = []

    @functools.cache
    def in_lanes(index, width):
        # A head alone has what it needs in any number of lanes.
        lanes = max(width, LANES) if heads == 1 else width
        if lanes > width:
            return in_lanes(index, lanes)[..., :width]
        return pack_columns.spread(columns[index][None], width, group, heads)

    if x.gates is not None:
        columns.append(x.gates[0])
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
