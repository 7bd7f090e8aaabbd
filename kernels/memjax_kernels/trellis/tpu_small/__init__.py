"""Trellis on a TPU for packs of heads in chunks of at most 8 tokens.

A block is 16 tokens, whose chunks follow one another; all packs of a program are
computed in step, so that one hides the latency of another. `equations` has those of a
chunk. What gates leave is computed before the kernels: a few numbers a token and head.

The forward kernel also saves the memories before every block where a gradient is taken,
in float32. The backward kernel goes through the blocks in reverse: it computes the
memories before a block's chunks again, and then each chunk's cotangents.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from memjax_kernels.common import gradients, products, varying
from memjax_kernels.common.packs.blocks import (
    ROWS,
    Specs,
    apart,
    divisor,
    flag_columns,
    gate_columns,
    join_chunks,
    packings,
    side_by_side,
    split_chunks,
)
from memjax_kernels.trellis.packed import Chunk
from memjax_kernels.trellis.segment import Tokens
from memjax_kernels.trellis.state import Memories
from memjax_kernels.trellis.tpu_packed import Blocks, gates_back
from memjax_kernels.trellis.tpu_small.equations import Decays, Options, Part
from memjax_kernels.trellis.tpu_small.kernels import (
    Layout,
    Rows,
    backward_kernel,
    forward_kernel,
)
from memjax_kernels.trellis.xla import trellis_xla

F32 = jnp.float32
# Rows of a register: a pack has the heads whose chunks fill it.
SUBLANES = 8
# Heads of a program, up to which it takes further batch elements, and bytes.
HEADS, VMEM_BYTES = 48, 57 << 20


class Static(NamedTuple):
    """What is fixed when a kernel is compiled."""

    phi: str
    activation: str
    layout: Layout
    interpret: Any


def fits(tokens: Tokens) -> bool:
    """Whether chunks are small, packs of heads fill whole registers, and one VMEM."""
    size = tokens.q.shape[2]
    return size < ROWS and ROWS % size == 0 and _heads(tokens) > 0


def _heads(tokens: Tokens) -> int:
    """Heads of a pack: as many as fill a register's rows, or its lanes; 0 is none."""
    size, heads = tokens.q.shape[2:4]
    widths = _widths(tokens)
    fitting = packings(heads, widths, _block_bytes(size, *widths))
    few = [number for number in fitting if number * size <= SUBLANES]
    return max(few, default=min(fitting, default=0))


def _widths(tokens: Tokens) -> tuple[int, int, int]:
    return tokens.q.shape[4], tokens.v.shape[4], tokens.alpha.shape[4]


def _block_bytes(
    size: int, key_dim: int, value_dim: int, slots: int, plain: bool = False
) -> int:
    """What the backward kernel holds in VMEM for a head, roughly."""
    # In float32. Buffers of memories in and out, and one before each chunk of a block;
    # more of them where operands are float32 too, or a chunk's two memories differ.
    # Tokens and their cotangents, in rows of whole registers.
    channels, parts = key_dim + value_dim, ROWS // size
    memories = slots * channels * (parts + (12 if plain else 16))
    rows = max(2 * ROWS, parts * SUBLANES)
    return 4 * (memories + rows * 3 * (channels + slots))


def trellis_small(
    tokens: Tokens,
    memories: Memories,
    empty: tuple[Array, ...] | None,
    *,
    phi: str,
    activation: str,
    interpret: Any = False,
) -> tuple[Memories, Array]:
    """A chunk implementation for what `fits`; see `segment`."""
    heads, (b, _, size, number) = _heads(tokens), tokens.q.shape[:4]
    may_differ = any(a is not b for a, b in zip(*memories, strict=True))
    plain = tokens.q.dtype == jnp.bfloat16 and not may_differ
    each = heads * _block_bytes(size, *_widths(tokens), plain)
    most = max(1, min(HEADS // heads, VMEM_BYTES // each))
    group = divisor(number // heads, most)
    layout = Layout(
        divisor(b, most // group),
        group,
        heads,
        tokens.gamma.shape[-1],
        tokens.g.shape[-1],
        apart=may_differ,
        resets=tokens.cleared is not None,
        size=size,
    )
    flag = lambda x: None if x is None else x.astype(F32)
    tokens = tokens._replace(
        complete=flag(tokens.complete), cleared=flag(tokens.cleared)
    )
    static = Static(phi, activation, layout, interpret)
    results: Any = _chunks(static, *varying.vary_alike((tokens, memories, empty)))
    return results


def _in_blocks(static: Static, x: Tokens) -> Tokens:
    """Several chunks in one, and flags of every token."""
    layout = static.layout
    # Where the two memories may differ, chunks behind all tokens keep them so. Where
    # they do after the last chunk alone, that one has to stay the last.
    join = functools.partial(join_chunks, parts=layout.parts, front=not layout.apart)
    of_tokens = lambda f: jnp.broadcast_to(f[..., None], x.q.shape[:3])
    flags = [f if f is None else of_tokens(f) for f in (x.complete, x.cleared)]
    x = x._replace(complete=flags[0], cleared=flags[1])
    return jax.tree.map(join, x)


def _arrange(layout: Layout, x: Tokens) -> Blocks:
    b, n, c = x.q.shape[:3]
    flat = lambda t: t.reshape(b, n, c, -1)
    columns = functools.partial(gate_columns, group=layout.group, heads=layout.heads)
    gates = [columns(x.gamma), columns(x.g)]
    flags = [flag for flag in (x.complete, x.cleared) if flag is not None]
    gates += [flag_columns(flag, gates[0]) for flag in flags]
    tokens = Chunk(*map(flat, (x.q, x.k, x.v, x.alpha)))
    return Blocks(tokens, jnp.concatenate(gates, axis=-1))


def _forward(static: Static, x: Tokens, memories: Memories, empty, *, keep: bool):
    layout, number = static.layout, x.q.shape[1]
    x = _in_blocks(static, x)
    blocks = _arrange(layout, x)
    join = functools.partial(side_by_side, heads=layout.heads)
    memories, empty = jax.tree.map(join, (memories, empty))
    like = functools.partial(varying.like, x.q)
    y = like((*x.q.shape[:3], x.v.shape[3] * x.v.shape[4]), x.v.dtype)
    after = jax.tree.map(lambda m: like(m.shape, F32), memories)
    before = lambda m: like((m.shape[0], x.q.shape[1], *m.shape[1:]), F32)
    kept = jax.tree.map(before, memories.start) if keep else None
    of = Specs(layout.rows, layout.group, blocks.gates.shape[2], lambda i: i)
    parts, d_parts = _scratch(layout, x)
    after, y, kept = _call(
        of,
        static,
        forward_kernel,
        "trellis_forward",
        blocks,
        (memories, empty),
        (after, y, kept),
        (
            Blocks(of.tokens(blocks.tokens), of.gates(blocks.gates)),
            of.memories(memories),
            of.memories(empty),
        ),
        (of.memories(after), of.tokens(y), of.kept(kept)),
        [parts, d_parts.v],
    )
    part = functools.partial(apart, heads=layout.heads)
    y = split_chunks(y.reshape(x.v.shape), layout.parts, not layout.apart, number)
    return (jax.tree.map(part, after), y), kept


def _backward(static: Static, primals, kept, cotangents):
    x, memories, empty = primals
    d_after, d_y = cotangents
    # Flags have no gradient.
    no_flags = jax.tree.map(jnp.zeros_like, (x.complete, x.cleared))
    number, layout = x.q.shape[1], static.layout
    x = _in_blocks(static, x)
    d_y = join_chunks(d_y, layout.parts, not layout.apart)
    blocks = _arrange(layout, x)
    b, n, c, heads, _ = x.q.shape
    of_pack = layout.heads
    join = functools.partial(side_by_side, heads=of_pack)
    running, empty, d_after = jax.tree.map(join, (memories.running, empty, d_after))
    d_y = d_y.reshape(b, n, c, -1)
    like = functools.partial(varying.like, x.q)
    shaped = lambda tree: jax.tree.map(lambda a: like(a.shape, a.dtype), tree)
    d_gates = like((b, n, heads // of_pack, 4, of_pack * c), F32)
    before, fresh = shaped(Memories(running, running)), shaped(empty)
    # The backward pass goes through the blocks in reverse.
    of = Specs(layout.rows, layout.group, blocks.gates.shape[2], lambda i: n - 1 - i)
    tokens = of.tokens(blocks.tokens)
    parts, d_parts = _scratch(layout, x)
    packs = layout.rows * layout.group
    at_chunks = lambda m: pltpu.VMEM((layout.parts, packs, *m.shape[2:]), F32)
    d_tokens, d_gates, d_memories, d_empty = _call(
        of,
        static,
        backward_kernel,
        "trellis_backward",
        blocks,
        (running, empty, kept, d_after, d_y),
        (shaped(blocks.tokens), d_gates, before, fresh),
        (
            Blocks(tokens, of.gates(blocks.gates)),
            of.memories(running),
            of.memories(empty),
            of.kept(kept),
            of.memories(d_after),
            of.tokens(d_y),
        ),
        (tokens, of.kept(d_gates), of.memories(before), of.memories(fresh)),
        [parts, d_parts.v, d_parts, jax.tree.map(at_chunks, running)],
    )
    d_gamma, d_g = gates_back(_of_gates(d_gates, layout), x, of_pack)
    d_x = Tokens(
        q=d_tokens.q.reshape(x.q.shape),
        k=d_tokens.k.reshape(x.k.shape),
        v=d_tokens.v.reshape(x.v.shape),
        alpha=d_tokens.alpha.reshape(x.alpha.shape),
        gamma=d_gamma,
        g=d_g,
        complete=None,
        cleared=None,
    )
    split = lambda d: split_chunks(d, layout.parts, not layout.apart, number)
    d_x = jax.tree.map(split, d_x)
    d_x = d_x._replace(complete=no_flags[0], cleared=no_flags[1])
    part = functools.partial(apart, heads=of_pack)
    return d_x, *jax.tree.map(part, (d_memories, d_empty))


def _of_gates(d: Float[Array, "B n P 4 CC"], layout: Layout) -> Array:
    """Cotangents of gates from those of their sums: sums from each token on."""
    gammas, sums = jnp.split(d, 2, axis=3)
    chunks = sums.reshape(*sums.shape[:4], -1, layout.size)
    gates = jax.lax.cumsum(chunks, chunks.ndim - 1, reverse=True)
    return jnp.concatenate([gammas, gates.reshape(sums.shape)], axis=3)


def _scratch(layout: Layout, x: Tokens) -> tuple[Part, Rows]:
    """Room for a block's tokens in parts, and for their cotangents."""
    packs, rows = layout.rows * layout.group, layout.heads * layout.size
    (key, value, slots), heads = _widths(x), layout.heads

    def room(number, width):
        return pltpu.VMEM((layout.parts, packs, number, width), F32)

    q, k, v = (room(rows, heads * width) for width in (key, key, value))
    of_slots, between = room(rows, slots), room(rows, rows)
    gammas = (of_slots,) * layout.gammas
    # Of single tokens these are 1.
    rest = (None, None) if layout.size == 1 else (of_slots, between)
    decays = (Decays(of_slots, *rest),) * layout.gates
    parts = Part(q, k, v, of_slots, gammas, decays)
    widths = (key, key, value, slots)
    return parts, Rows(*(room(layout.size, heads * width) for width in widths))


def _in_xla(static: Static, x: Tokens, memories: Memories, empty):
    """The function of the forward kernel."""
    flag = lambda f: None if f is None else f > 0.5
    x = x._replace(complete=flag(x.complete), cleared=flag(x.cleared))
    return trellis_xla(x, memories, empty, phi=static.phi, activation=static.activation)


_chunks = gradients.of_kernels("trellis", _forward, _backward, _in_xla)


def _call(of: Specs, static: Static, kernel, name, x: Blocks, *blocks):
    dtype, layout = products.operand_dtype(x.tokens.q), static.layout
    given = (dtype, layout.heads, layout.size)
    options = Options(static.phi, static.activation, *given)
    kernel = functools.partial(kernel, layout=layout, options=options)
    return of.call(kernel, name, x, *blocks, interpret=static.interpret)
