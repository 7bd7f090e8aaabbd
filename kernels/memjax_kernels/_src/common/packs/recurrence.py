"""Recurrences S' = f(S, chunk) on a TPU: without a copy of the tokens.

All packs of heads of a program are computed in step, so that one hides the latency of
another. The memory is an output block that all chunks of a head share: it stays in VMEM
from the first chunk to the last. An op brings the equations of a chunk and of its
gradient. A reset is a gate that forgets all.

The forward kernel also saves the memory at every chunk's start where a gradient is
taken, in the dtype that the op asks for. The backward kernel goes through the chunks in
reverse and computes each again from there.

Value heads may share the queries and keys of a key head: programs read them once, and
sum their gradients.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import chunks, gradients, partition, varying
from memjax_kernels._src.common.gate_sums import FORGETS_ALL
from memjax_kernels._src.common.groups import by_copies, by_groups
from memjax_kernels._src.common.packs import recurrence_kernels
from memjax_kernels._src.common.packs.blocks import (
    LANES,
    Specs,
    gate_columns,
    gates_of_columns,
    group_sizes,
    other_dtypes,
    pack_heads,
    packings,
    unpack_heads,
)
from memjax_kernels._src.common.packs.recurrence_kernels import Op, Packing, Static

F32 = jnp.float32
CHUNK_SIZE = 64


class Tokens(NamedTuple):
    """Chunks of a segment; value head h has the keys of head h // (H / G).

    g are log gates, of a head or of each channel of keys or values: 0 without gates,
    and lowest where a reset is; beta write rates of an op that has some, or `rates` of
    channels.
    """

    q: Float[Array, "B n C G K"]
    k: Float[Array, "B n C G K"]
    v: Float[Array, "B n C H V"]
    g: Float[Array, "B n C H"] | Float[Array, "B n C H G"]
    beta: Float[Array, "B n C H"] | None
    rates: tuple[Float[Array, "B n C H _"], ...] = ()


class Blocks(NamedTuple):
    """A segment as the kernels take it.

    Attributes:
        tokens: q, k, v, gates and rates of channels, each [B, n, C, heads D].
        columns: [B, n, groups, C, heads of a group] of the gates of heads, and behind
            them of the rates; float32. Without those of gates of channels.
    """

    tokens: tuple[Any, ...]
    columns: Any


def unsupported(q: Any, k: Any, v: Any) -> str:
    """Why the kernels cannot take these arguments on any TPU; "" if they can."""
    if reason := other_dtypes(q, k, v):
        return reason
    if q.shape[1] < CHUNK_SIZE:
        return f"{q.shape[1]} tokens are less than a chunk of {CHUNK_SIZE}"
    if not _pack(q, v):
        return (
            f"no number of {v.shape[2]} heads fills {LANES} lanes with keys of "
            f"{q.shape[3]} and values of {v.shape[3]}, and fits in VMEM"
        )
    return ""


def recur(
    op: Op,
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H"] | Float[Array, "B T H D"] | None,
    state: Float[Array, "B H K V"],
    reset: Bool[Array, "B T"] | None,
    *,
    beta: Float[Array, "B T H"] | None = None,
    rates: tuple[Float[Array, "B T H _"], ...] = (),
    interpret: Any = False,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """An op over T tokens; g None is no decay, beta and rates are of ops with some."""
    time = q.shape[1]
    g = jnp.zeros(v.shape[:3], F32) if g is None else g.astype(F32)
    if reset is not None:
        at = reset.reshape(*reset.shape, *(1,) * (g.ndim - 2))
        g = jnp.where(at, FORGETS_ALL, g)
    # Devices that divide value heads have the key heads of theirs.
    devices = partition.head_ways(v.shape[2], q, k, v, state)
    q, k = (_repeat(x, devices // math.gcd(devices, q.shape[2])) for x in (q, k))
    # Tokens of zeros, gate and rate included, leave the memory as it is.
    tokens = jax.tree.map(
        lambda x: chunks.split(x, CHUNK_SIZE, None), Tokens(q, k, v, g, beta, rates)
    )
    form = partition.chunkwise(functools.partial(_on_device, op))
    state, y = form(tokens, state, interpret=interpret)
    return state, chunks.join(y, time, None)


def _on_device(op: Op, tokens: Tokens, state: Array, *, interpret: Any):
    packing = _pack(tokens.q, tokens.v)
    if not packing:
        # A device of a mesh may hold heads that fill no lanes.
        return _in_xla(op, tokens, state)
    copies = tokens.v.shape[3] // tokens.q.shape[3] // packing.ways
    q, k = (_repeat(x, copies) for x in tokens[:2])
    tokens = tokens._replace(q=q, k=k)
    static = Static(op, packing, interpret)
    results: Any = _chunks(op)(static, *varying.vary_alike((tokens, state)))
    return results


def _repeat(x: Array, copies: int) -> Array:
    """Copies of each head beside each other."""
    return x if copies == 1 else jnp.repeat(x, copies, axis=-2)


def _pack(q: Any, v: Any) -> Packing | None:
    """The packing of as few heads as fill the lanes, and of as many packs as fit.

    Of a key head's value heads as many share it as can; the others need copies. Shapes
    alone will do.
    """
    number, widths = v.shape[-2], (q.shape[-1], v.shape[-1])
    each = _block_bytes(*widths)
    fitting = packings(number, widths, each)
    all_ways = number // q.shape[-2]
    for ways in range(all_ways, 0, -1):
        if all_ways % ways or not fitting:
            continue
        heads = fitting[0]
        for group in group_sizes(number // heads, heads * each):
            of_program = group * heads
            block = max(1, of_program // ways)
            divides = not (of_program % ways and ways % of_program)
            whole = block * widths[0] % LANES == 0 or block * ways == number
            if divides and whole:
                return Packing(group, heads, ways)
    return None


def _block_bytes(key_dim: int, value_dim: int) -> int:
    """Estimate of the backward kernel's VMEM for one head, in bytes."""
    # In float32. Two buffers of each block in and out: tokens and their cotangents, and
    # 6 of a memory; and the values in between: 4 of a memory, 12 of a token's channels,
    # 4 of pairs of tokens.
    tokens = CHUNK_SIZE * (2 * key_dim + 2 * value_dim) * 4
    memories = key_dim * value_dim * (6 + 4)
    between = CHUNK_SIZE * (12 * (key_dim + value_dim) + 4 * CHUNK_SIZE)
    return 4 * (tokens + memories + between)


def _arrange(static: Static, x: Tokens) -> Blocks:
    def flat(t):
        return t.reshape(*t.shape[:3], -1)

    tokens = flat(x.q), flat(x.k), flat(x.v)
    if x.g.ndim == x.q.ndim:
        rates = x.beta
        if rates is not None:
            rates = gate_columns(rates.astype(F32), *static.packing[:2])
        return Blocks((*tokens, flat(x.g), *map(flat, x.rates)), rates)
    both = x.g if x.beta is None else jnp.stack([x.g, x.beta.astype(F32)], axis=-1)
    return Blocks(tokens, gate_columns(both, *static.packing[:2]))


def _undo(static: Static, d: Blocks, x: Tokens) -> Tokens:
    """Cotangents of tokens from those of blocks."""
    group, heads, _ = static.packing
    number = group * heads

    def shared(y):
        # Of programs with the same key head.
        parts = y.reshape(*x.q.shape[:4], static.packing.share, -1)
        return parts.sum(4).astype(x.q.dtype)

    q, k = map(shared, d.tokens[:2])
    v = d.tokens[2].reshape(x.v.shape)
    rates = ()
    if len(d.tokens) > 3:
        g = d.tokens[3].reshape(x.g.shape)
        pairs = zip(d.tokens[4:], x.rates, strict=True)
        rates = tuple(y.reshape(rate.shape) for y, rate in pairs)
    else:
        g = gates_of_columns(d.columns[..., :number], group, heads)
    if x.beta is None:
        return Tokens(q, k, v, g, None, rates)
    beta = gates_of_columns(d.columns[..., -number:], group, heads)
    return Tokens(q, k, v, g, beta.astype(x.beta.dtype))


def _specs_for(static: Static, x: Tokens, order) -> Specs:
    """Blocks of the kernels' programs."""
    group, heads, _ = static.packing
    return Specs(None, group, x.v.shape[3] // group // heads, order)


def _forward(static: Static, x: Tokens, state: Array, *, with_residuals: bool):
    heads = static.packing.heads
    blocks, state = _arrange(static, x), pack_heads(state, heads)
    like = functools.partial(varying.like, x.q)
    y = like(blocks.tokens[2].shape, x.v.dtype)
    shape = (state.shape[0], x.q.shape[1], *state.shape[1:])
    residuals = (
        like(shape, F32 if static.op.exact else x.q.dtype) if with_residuals else None
    )
    after = like(state.shape, F32)
    of = _specs_for(static, x, lambda i: i)
    after, y, residuals = _call(
        of,
        static,
        recurrence_kernels.forward_kernel,
        "forward",
        blocks,
        inputs=(state,),
        outputs=(after, y, residuals),
        specs=(_specs(of, static, blocks), of.memories(state)),
        out_specs=(of.memories(after), of.tokens(y), of.residuals(residuals)),
    )
    return (unpack_heads(after, heads), y.reshape(x.v.shape)), residuals


def _backward(static: Static, primals, residuals, cotangents):
    x, _ = primals
    d_after, d_y = cotangents
    heads = static.packing.heads
    blocks, d_after = _arrange(static, x), pack_heads(d_after, heads)
    d_y = d_y.reshape(blocks.tokens[2].shape)
    shaped = functools.partial(varying.like_tree, x.q)
    n = x.q.shape[1]
    # The backward pass goes through the chunks in reverse.
    of = _specs_for(static, x, lambda i: n - 1 - i)
    specs, memories = _specs(of, static, blocks), of.memories(d_after)
    d_blocks = _gradients(static, blocks)
    d_x, d_state = _call(
        of,
        static,
        recurrence_kernels.backward_kernel,
        "backward",
        blocks,
        inputs=(residuals, d_after, d_y),
        outputs=(shaped(d_blocks), shaped(d_after)),
        specs=(specs, of.residuals(residuals), memories, of.tokens(d_y)),
        out_specs=(_specs(of, static, d_blocks, own=True), memories),
    )
    return _undo(static, d_x, x), unpack_heads(d_state, heads)


def _gradients(static: Static, x: Blocks) -> Blocks:
    """Outputs of the backward kernel: each program's part of a key head's gradient."""
    share = static.packing.share

    def part(y):
        shape = (*y.shape[:3], share * y.shape[3])
        return varying.like(y, shape, y.dtype if share == 1 else F32)

    q, k, *others = x.tokens
    return Blocks((part(q), part(k), *others), x.columns)


@functools.cache
def _chunks(op: Op) -> Any:
    """The op of two kernels, and its gradient."""
    return gradients.of_kernels(
        op.name, _forward, _backward, lambda static, x, state: _in_xla(op, x, state)
    )


def _in_xla(op: Op, x: Tokens, state: Array):
    """The function of the forward kernel."""

    def form(*given):
        return op.in_xla(*given[:-1], chunk_size=CHUNK_SIZE)

    share = by_copies if x.g.ndim == x.q.ndim else by_groups
    *tokens, rates = jax.tree.map(lambda y: y.reshape(y.shape[0], -1, *y.shape[3:]), x)
    ways = x.v.shape[3] // x.q.shape[3]
    state, y = share(form, ways)(*tokens, *rates, state, None)
    return state, y.reshape(x.v.shape)


def _specs(of: Specs, static: Static, x: Blocks, own: bool = False) -> Blocks:
    """Blocks of tokens; with `own` each program has its own of key heads."""
    columns = None if x.columns is None else of.gates(x.columns)
    q, k, *others = x.tokens
    share = 1 if own else static.packing.share
    return Blocks((*of.tokens((q, k), share), *of.tokens(tuple(others))), columns)


def _call(of: Specs, static: Static, kernel, name, x: Blocks, **blocks):
    kernel = functools.partial(kernel, static=static)
    name = f"{static.op.name}_{name}"
    return of.call(kernel, name, x, **blocks, interpret=static.interpret)
