"""Short convolutions, gates and the gated delta rule on a TPU, in one kernel.

    s = h + h tanh(h), 2 h = b + Σ_w f_w x_{t - (W - 1 - w)}       q, k = s / |s|, v = s
    β = max_rate σ(r)        g = -exp(log_rate) softplus(p + bias)

A stage in front of the chunk's equations writes q, k and v to VMEM, where these read
them. Inputs lie there behind the last ones of the chunk before; filters are halved on
the way in, as in `recurrent_block.convolution_tpu`. There is no backward kernel.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from memjax_kernels._src.common import chunks, packs, partition, varying
from memjax_kernels._src.common.gate_sums import FORGETS_ALL
from memjax_kernels._src.common.packs import recurrence
from memjax_kernels._src.common.packs.blocks import (
    LANES,
    PARAMS,
    Specs,
    pack_heads,
    unpack_heads,
)
from memjax_kernels._src.common.packs.chunk_kernels import load, store
from memjax_kernels._src.common.packs.chunkwise import Blocks
from memjax_kernels._src.common.packs.layout import Layout
from memjax_kernels._src.common.packs.recurrence import CHUNK_SIZE
from memjax_kernels._src.common.packs.recurrence_chunk import equations
from memjax_kernels._src.linear.pallas_tpu import DELTA
from memjax_kernels._src.linear.table import Decay
from memjax_kernels._src.recurrent_block.norms import LEAST_SQUARES, flat

F32 = jnp.float32
# Rows of filters and their bias, and of the inputs before a chunk.
ROWS = 8
# The logit of tokens that are none: they write nothing and forget nothing.
NONE = -jnp.inf


class Segment(NamedTuple):
    """Arguments of the op; `inputs` to `before` are of q, k and v.

    `seen` [B, T] are tokens since a reset, W at most; None is without resets.
    """

    inputs: tuple[Array, Array, Array]
    filters: tuple[Array, Array, Array]
    biases: tuple[Array, Array, Array] | None
    before: tuple[Array, Array, Array]
    rates: Float[Array, "B T H"]
    paces: Float[Array, "B T H"]
    decay: Decay
    state: Float[Array, "B H K V"]
    seen: Array | None


class Static(NamedTuple):
    """Static arguments of the kernel."""

    taps: int
    has_bias: bool
    scale: float
    max_rate: float
    interpret: Any


# Any: jax also builds this class around shapes, blocks and references.
class Chunks(NamedTuple):
    """Tokens, logits and `seen` of a segment by chunks, [B, n, C, ...]."""

    tokens: Any
    rates: Any
    paces: Any
    seen: Any


def unsupported(x: Segment) -> str:
    """Why the kernel cannot take these arguments on any TPU; "" if it can."""
    if reason := recurrence.unsupported(*x.inputs):
        return reason
    rows = x.filters[0].shape[0] + (x.biases is not None)
    if rows > ROWS:
        return f"filters and their bias have {rows} rows, more than {ROWS}"
    q, _, v = x.inputs
    # A device of a mesh has its share of heads.
    devices = partition.head_ways(q.shape[2], x)
    shares = [(y.shape[2] // devices, y.shape[3]) for y in (q, v)]
    if _layout(*(jax.ShapeDtypeStruct(share, q.dtype) for share in shares)) is None:
        return f"{shares[0]} key and {shares[1]} value channels fill no {LANES} lanes"
    return ""


def _layout(q: Any, v: Any) -> Layout | None:
    """The program's blocks, in which every key head's values have its keys."""
    found, width = recurrence.packing_of(q, v), q.shape[-1]
    if found is None or found.ways * q.shape[-2] != v.shape[-2]:
        return None
    layout = Layout(1, *found[:2], CHUNK_SIZE, (2,), False, False, ways=found.ways)
    lanes = layout.share * layout.group * layout.heads // layout.ways * width
    of_registers = width % LANES == 0 or LANES % width == 0
    return layout if of_registers and lanes % LANES == 0 else None


def convolved_gated_delta_rule_tpu(
    x: Segment, *, scale: float, max_rate: float, interpret: Any = False
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """`convolved_gated_delta_rule` in a kernel."""
    time, taps = x.rates.shape[1], x.filters[0].shape[0]

    def split(x):
        return chunks.split(x, CHUNK_SIZE, None)

    def padded(x, value):
        rest = [(0, 0), (0, -time % CHUNK_SIZE), (0, 0)]
        return split(jnp.pad(x.astype(F32), rest, constant_values=value))

    seen = x.seen
    if seen is not None:
        # A column for each head, as a mesh divides heads.
        seen = padded(jnp.broadcast_to(seen[..., None], x.rates.shape), 1.0)
    logits = padded(x.rates, NONE), padded(x.paces, NONE)
    tokens = Chunks(jax.tree.map(split, x.inputs), *logits, seen)
    biases, speeds = (y.astype(F32) for y in (x.decay.bias, x.decay.log_rate))
    # Infinite ones would leave NaN where there is no token.
    largest = jnp.finfo(F32).max
    of_heads = jnp.clip(jnp.stack([biases, -jnp.exp(speeds)], 1), -largest, largest)
    static = Static(taps, x.biases is not None, scale, max_rate, interpret)
    form = partition.chunkwise(functools.partial(_on_device, static))
    given = tuple(_weights(x, i) for i in range(3)), of_heads[None]
    state, y = form(tokens, *given, x.state)
    return state, chunks.join(y, time, None)


def _weights(x: Segment, i: int) -> Float[Array, "B H _ K"]:
    """Half of the filters and the bias, and the inputs before, in `ROWS` each."""
    before = x.before[i].astype(x.inputs[i].dtype).astype(F32)
    filters, bias = x.filters[i], () if x.biases is None else (x.biases[i][None],)
    half = 0.5 * jnp.concatenate([y.astype(F32) for y in (filters, *bias)])
    half = jnp.broadcast_to(half, (before.shape[0], *half.shape))
    empty = 2 * ROWS - half.shape[1] - before.shape[1]
    between = jnp.zeros((before.shape[0], empty, *before.shape[2:]), F32)
    return jnp.swapaxes(jnp.concatenate([half, between, before], axis=1), 1, 2)


def _on_device(static: Static, x: Chunks, weights, of_heads, state):
    """On a device's share: [B, n, C, H, ...], weights [B, H, 2 ROWS, .], [1, H, 2]."""
    x, weights, of_heads, state = varying.vary_alike((x, weights, of_heads, state))
    q, _, v = x.tokens
    layout = _layout(q, v)
    assert layout is not None
    groups = v.shape[3] // (layout.group * layout.heads)
    of = Specs(1, layout.group, groups, lambda i: i)
    always = of._replace(order=lambda i: 0)
    shares = (layout.share, layout.share, 1)
    tokens = tuple(map(flat, x.tokens))
    weights = tuple(flat(jnp.swapaxes(w, 1, 2))[:, None] for w in weights)
    memory = pack_heads(state, layout.heads)

    def by_share(specs):
        return lambda arrays: tuple(map(specs.tokens, arrays, shares))

    def whole(z):
        return pl.BlockSpec((None, None, *z.shape[2:]), lambda b, g, i: (b, i, 0, 0))

    def in_columns(z):
        """Heads in the order of `blocks.gate_columns`."""
        split = z.reshape(*z.shape[:-1], -1, layout.group, layout.heads)
        return jnp.swapaxes(split, -1, -2).reshape(z.shape)

    rates, paces, of_heads = map(in_columns, (x.rates, x.paces, of_heads[0].T))
    given = x._replace(tokens=tokens, rates=rates, paces=paces)
    specs = jax.tree.map(whole, x._replace(tokens=None))
    specs = specs._replace(tokens=by_share(of)(tokens))
    like = functools.partial(varying.like, v)
    after, y = like(memory.shape, F32), like(tokens[2].shape, v.dtype)
    wide = [t.shape[-1] * s // groups for t, s in zip(tokens, shares, strict=True)]
    # Values are read in float32 alone, and products round queries and keys.
    kinds = zip(wide, (q.dtype, q.dtype, F32), strict=True)
    made = [pltpu.VMEM((1, CHUNK_SIZE, n), dtype) for n, dtype in kinds]
    columns = [pltpu.VMEM((n // LANES, ROWS + CHUNK_SIZE, LANES), F32) for n in wide]
    widths = q.shape[-1], q.shape[-1], None
    after, y = pl.pallas_call(
        functools.partial(_kernel, static=static, layout=layout, widths=widths),
        grid=of.grid(y),
        in_specs=(
            specs,
            by_share(always)(weights),
            pl.BlockSpec(of_heads.shape, lambda b, g, i: (0, 0)),
            of.memories(memory),
        ),
        out_specs=(of.memories(after), of.tokens(y)),
        out_shape=(after, y),
        scratch_shapes=(columns, made),
        compiler_params=PARAMS,
        interpret=static.interpret,
        name="convolved_gated_delta_rule_forward",
    )(given, weights, of_heads, memory)
    return unpack_heads(after, layout.heads), y.reshape(v.shape)


def _kernel(
    x, weights, of_heads, before, after, y, columns, made, *, static, layout, widths
):
    """One chunk."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        after[...] = before[...]
        for column, rows in zip(columns, weights, strict=True):
            for i, at in _registers(rows.shape[-1]):
                column[i, :ROWS] = rows[0, ROWS:, at]

    seen = None if x.seen is None else x.seen[:, :1]
    gates = _gates(static, layout, x, of_heads, seen)
    scales = static.scale, 1.0, 1.0
    for given in zip(x.tokens, weights, columns, made, widths, scales, strict=True):
        _convolve(static, seen, *given)
    chunk = equations(DELTA).read(Blocks(made, gates[None]), layout)
    new, reads = DELTA.advance(chunk, load(after))
    store(after, new)
    packs.store_rows(y, reads)


def _registers(lanes: int) -> list[tuple[int, slice]]:
    return [(i, slice(i * LANES, (i + 1) * LANES)) for i in range(lanes // LANES)]


def _convolve(static: Static, seen, x, weights, columns, made, width, scale):
    """Writes the heads of q, k or v; `width` is that of a head of unit norm."""
    each = max(1, (width or LANES) // LANES)
    every = _registers(x.shape[-1])
    for first in range(0, len(every), each):
        some = every[first : first + each]
        parts = [
            _register(static, seen, x[0, :, at], weights[0, :ROWS, at], columns.at[i])
            for i, at in some
        ]
        if width is not None:
            # Of heads wider than a register, the squares of all of a head's.
            squares = functools.reduce(jnp.add, [part * part for part in parts])
            sums = packs.sums(squares[None], max(1, LANES // width))
            roots = [scale * jax.lax.rsqrt(total + LEAST_SQUARES) for total in sums]
            parts = [part * packs.widen(roots, LANES)[0] for part in parts]
        for part, (_, at) in zip(parts, some, strict=True):
            made[0, :, at] = part.astype(made.dtype)


def _register(static: Static, seen, x, weights, column) -> Float[Array, "C 128"]:
    """silu of the convolution of a register's lanes; `column` keeps the last inputs."""
    x, last = x.astype(F32), static.taps - 1
    column[ROWS:] = x
    h = weights[last : last + 1] * x
    for tap in range(last):
        input = column[pl.ds(ROWS - last + tap, CHUNK_SIZE)]
        if seen is not None:
            input = jnp.where(seen >= last - tap, input, 0.0)
        h += weights[tap : tap + 1] * input
    if static.has_bias:
        h += weights[last + 1 : last + 2]
    column[:ROWS] = x[-ROWS:]
    return h + h * jnp.tanh(h)


def _gates(static: Static, layout: Layout, x, of_heads, seen) -> Float[Array, "C R"]:
    """Columns of the program's log gates, and behind them of its rates."""
    z = x.paces[...] + of_heads[:1]
    pace = jnp.maximum(z, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(z)))
    g = jnp.maximum(of_heads[1:] * pace, FORGETS_ALL)
    if seen is not None:
        g = jnp.where(seen == 0, FORGETS_ALL, g)
    beta = static.max_rate * packs.sigmoid(x.rates[...])
    number = layout.gate_columns // 2
    columns = jnp.concatenate([g[:, :number], beta[:, :number]], axis=1)
    for group in range(1, g.shape[1] // number):
        own = slice(group * number, (group + 1) * number)
        others = jnp.concatenate([g[:, own], beta[:, own]], axis=1)
        columns = jnp.where(pl.program_id(1) == group, others, columns)
    return columns
