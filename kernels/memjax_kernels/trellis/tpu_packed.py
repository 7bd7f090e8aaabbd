"""Trellis on a TPU for packs of heads: tokens are read and written where they lie.

The grid is (batch elements, groups of packs, chunks), the last in order. All packs of a
group, and of a few batch elements where these are small, are computed in step, so that
one hides the latency of another. The memories are output blocks that all chunks of a
head share: they stay in VMEM from the first chunk to the last. `packed` has the
equations of a chunk; those of fewer than 16 tokens go through `tpu_small`.

The forward kernel also saves the memories at every chunk's start where a gradient is
taken, in the dtype of the tokens. The backward kernel goes through the chunks in
reverse and computes each again from there.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from memjax_kernels.common import gradients, products, varying
from memjax_kernels.common.gate_sums import FORGETS_ALL
from memjax_kernels.common.packs.blocks import (
    LANES,
    ROWS,
    Specs,
    apart,
    divisor,
    flag_columns,
    gate_columns,
    group_size,
    packings,
    side_by_side,
)
from memjax_kernels.trellis import packed, tpu_packed_kernels
from memjax_kernels.trellis.chunk import Options
from memjax_kernels.trellis.segment import Tokens
from memjax_kernels.trellis.state import Memories
from memjax_kernels.trellis.tpu_packed_blocks import Layout
from memjax_kernels.trellis.xla import trellis_xla

F32 = jnp.float32
# Up to so many tokens of all heads, and bytes, a program takes further batch elements:
# a small one waits for its products.
TOKENS, ROWS_BYTES = 768, 48 << 20


class Static(NamedTuple):
    """What is fixed when a kernel is compiled."""

    phi: str
    activation: str
    layout: Layout
    interpret: Any


def fits(tokens: Tokens) -> bool:
    """Whether packs of heads fill whole registers, and one fits in VMEM."""
    size = tokens.q.shape[2]
    return size % ROWS == 0 and _heads(tokens) > 0


def _heads(tokens: Tokens) -> int:
    """Heads of a pack, as many as the lanes hold tokens of; 0 is none."""
    size, heads = tokens.q.shape[2:4]
    widths = (tokens.q.shape[4], tokens.v.shape[4], tokens.alpha.shape[4])
    # Two heads at least: nothing here is written for one.
    most = max(2, LANES // size)
    fitting = packings(heads, widths, _block_bytes(size, *widths))
    return max((number for number in fitting if 2 <= number <= most), default=0)


def trellis_packed(
    tokens: Tokens,
    memories: Memories,
    empty: tuple[Array, ...] | None,
    *,
    phi: str,
    activation: str,
    interpret: Any = False,
) -> tuple[Memories, Array]:
    """A chunk implementation for what `fits`; see `segment`."""
    widths = (tokens.q.shape[4], tokens.v.shape[4], tokens.alpha.shape[4])
    heads, (b, _, size, number) = _heads(tokens), tokens.q.shape[:4]
    each = heads * _block_bytes(size, *widths)
    group = group_size(number // heads, each)
    rows = min(TOKENS // (group * heads * size), ROWS_BYTES // (group * each))
    layout = Layout(
        divisor(b, rows),
        group,
        heads,
        tokens.gamma.shape[-1],
        tokens.g.shape[-1],
        apart=any(a is not b for a, b in zip(*memories, strict=True)),
        resets=tokens.cleared is not None,
    )
    flag = lambda x: None if x is None else x.astype(F32)
    tokens = tokens._replace(
        complete=flag(tokens.complete), cleared=flag(tokens.cleared)
    )
    static = Static(phi, activation, layout, interpret)
    results: Any = _chunks(static, *varying.vary_alike((tokens, memories, empty)))
    return results


def _block_bytes(size: int, key_dim: int, value_dim: int, slots: int) -> int:
    """What the backward kernel holds in VMEM for a head, roughly."""
    # In float32. Two buffers of each block in and out: tokens and their cotangents, and
    # 16 of a memory; and the values in between: 40 arrays of a token's slots, 8 of a
    # memory, 10 of its tokens.
    channels = key_dim + value_dim
    tokens = size * (2 * key_dim + 2 * value_dim + slots) * 4
    memories = slots * channels * (16 + 4)
    between = size * (40 * slots + 10 * channels)
    return 4 * (tokens + memories + between)


class Blocks(NamedTuple):
    """The arrays of `Tokens` as the kernels take them.

    Attributes:
        tokens: q, k, v, alpha, each [B, n, C, H D].
        gates: [B, n, groups, C, R] float32; see `blocks.gate_columns`.
    """

    tokens: packed.Chunk
    gates: Any


def _arrange(static: Static, x: Tokens) -> Blocks:
    b, n, c = x.q.shape[:3]
    flat = lambda t: t.reshape(b, n, c, -1)
    columns = functools.partial(
        gate_columns, group=static.layout.group, heads=static.layout.heads
    )
    gates = [columns(x.gamma), columns(x.g)]
    flags = [flag for flag in (x.complete, x.cleared) if flag is not None]
    gates += [flag_columns(flag, gates[0]) for flag in flags]
    gates = jnp.concatenate(gates, axis=-1)
    chunk = packed.Chunk(*map(flat, (x.q, x.k, x.v, x.alpha)))
    return Blocks(chunk, gates)


def _forward(static: Static, x: Tokens, memories: Memories, empty, *, keep: bool):
    layout, blocks = static.layout, _arrange(static, x)
    join = functools.partial(side_by_side, heads=layout.heads)
    memories, empty = jax.tree.map(join, (memories, empty))
    like = functools.partial(varying.like, x.q)
    y = like((*x.q.shape[:3], x.v.shape[3] * x.v.shape[4]), x.v.dtype)
    after = jax.tree.map(lambda m: like(m.shape, F32), memories)
    # In the tokens' dtype, to which the operands of products are rounded anyway.
    at_start = lambda m: like((m.shape[0], x.q.shape[1], *m.shape[1:]), x.q.dtype)
    kept = jax.tree.map(at_start, memories.start) if keep else None
    of = Specs(layout.rows, layout.group, blocks.gates.shape[2], lambda i: i)
    after, y, kept = _call(
        of,
        static,
        tpu_packed_kernels.forward_kernel,
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
    )
    part = functools.partial(apart, heads=layout.heads)
    return (jax.tree.map(part, after), y.reshape(x.v.shape)), kept


def _backward(static: Static, primals, kept, cotangents):
    x, memories, empty = primals
    d_after, d_y = cotangents
    # Flags have no gradient.
    no_flags = jax.tree.map(jnp.zeros_like, (x.complete, x.cleared))
    layout, blocks = static.layout, _arrange(static, x)
    b, n, c, heads, _ = x.q.shape
    of_pack = static.layout.heads
    join = functools.partial(side_by_side, heads=of_pack)
    running, empty, d_after = jax.tree.map(join, (memories.running, empty, d_after))
    d_y = d_y.reshape(b, n, c, -1)
    like = functools.partial(varying.like, x.q)
    shaped = lambda tree: jax.tree.map(lambda a: like(a.shape, a.dtype), tree)
    d_gates = like((b, n, heads // of_pack, 4, of_pack * c), F32)
    before, fresh = shaped(Memories(running, running)), shaped(empty)
    # The backward pass goes through the chunks in reverse.
    of = Specs(layout.rows, layout.group, blocks.gates.shape[2], lambda i: n - 1 - i)
    tokens = of.tokens(blocks.tokens)
    d_tokens, d_gates, d_memories, d_empty = _call(
        of,
        static,
        tpu_packed_kernels.backward_kernel,
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
    )
    d_gamma, d_g = gates_back(d_gates, x, of_pack)
    d_x = Tokens(
        q=d_tokens.q.reshape(x.q.shape),
        k=d_tokens.k.reshape(x.k.shape),
        v=d_tokens.v.reshape(x.v.shape),
        alpha=d_tokens.alpha.reshape(x.alpha.shape),
        gamma=d_gamma,
        g=d_g,
        complete=no_flags[0],
        cleared=no_flags[1],
    )
    part = functools.partial(apart, heads=of_pack)
    return d_x, *jax.tree.map(part, (d_memories, d_empty))


def gates_back(d_gates: Array, x: Tokens, of_pack: int) -> tuple[Array, Array]:
    """[B, n, P, 4, CC], of gamma and g in each pass, as gradients of both gates."""
    b, n, c, heads, _ = x.q.shape
    split = d_gates.reshape(b, n, heads // of_pack, 4, of_pack, c)
    by_head = split.transpose(0, 1, 5, 2, 4, 3).reshape(b, n, c, heads, 4)
    d_gamma, d_g = by_head[..., :2], by_head[..., 2:]
    if x.gamma.shape[-1] == 1:
        d_gamma = d_gamma.sum(-1, keepdims=True)
    if x.g.shape[-1] == 1:
        d_g = d_g.sum(-1, keepdims=True)
    # What was raised to the lowest gate has no gradient.
    return d_gamma, jnp.where(x.g > FORGETS_ALL, d_g, 0.0)


def _in_xla(static: Static, x: Tokens, memories: Memories, empty):
    """The function of the forward kernel."""
    flag = lambda f: None if f is None else f > 0.5
    x = x._replace(complete=flag(x.complete), cleared=flag(x.cleared))
    return trellis_xla(x, memories, empty, phi=static.phi, activation=static.activation)


_chunks = gradients.of_kernels("trellis", _forward, _backward, _in_xla)


def _call(of: Specs, static: Static, kernel, name, x: Blocks, *blocks):
    dtype = products.operand_dtype(x.tokens.q)
    multiply = functools.partial(products.multiply, dtype=dtype)
    options = Options(static.phi, static.activation, multiply)
    kernel = functools.partial(kernel, layout=static.layout, options=options)
    return of.call(kernel, name, x, *blocks, interpret=static.interpret)
