"""Calls of the Trellis kernels for packed heads: layouts of arrays before and after.

The grid is (batch elements, groups of packs, blocks), the last in order. All packs of a
group, and of a few batch elements where these are small, are computed in step, so that
one hides the latency of another. A block is a chunk, or 16 tokens of smaller ones that
follow one another. The memories are output blocks that all blocks of a head share: they
stay in VMEM from the first to the last.

The forward kernel also saves the memories before every block where a gradient is taken.
The backward kernel goes through the blocks in reverse and computes each again.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from memjax_kernels._src.common import gradients, products, varying
from memjax_kernels._src.common.gate_sums import FORGETS_ALL
from memjax_kernels._src.common.packs import pack_products
from memjax_kernels._src.common.packs.blocks import (
    Specs,
    flag_columns,
    gate_columns,
    join_chunks,
    pack_heads,
    split_chunks,
    unpack_heads,
)
from memjax_kernels._src.trellis import packed
from memjax_kernels._src.trellis.chunk import Options
from memjax_kernels._src.trellis.segment import Tokens
from memjax_kernels._src.trellis.tpu_packed_blocks import Layout
from memjax_kernels._src.trellis.xla import trellis_xla

F32 = jnp.float32


def _no_scratch(layout, x):
    return (), ()


class Kernels(NamedTuple):
    """The two kernels and their options.

    Attributes:
        forward: of references to blocks; see `tpu_packed_kernels`.
        backward: likewise.
        residuals: dtype of the memories saved before blocks; None is that of the
            tokens, to which operands of products are rounded anyway.
        scratch: (layout, tokens in blocks) -> what each has in VMEM alone.
    """

    forward: Callable[..., None]
    backward: Callable[..., None]
    residuals: Any = None
    scratch: Callable[[Any, Any], tuple[Sequence[Any], Sequence[Any]]] = _no_scratch


class Static(NamedTuple):
    """Static arguments of the kernels."""

    phi: str
    activation: str
    layout: Layout
    interpret: Any


def run(
    op: Callable[..., Any],
    layout: Layout,
    tokens: Tokens,
    memory: tuple[Array, Array],
    empty: tuple[Array, Array] | None,
    *,
    phi: str,
    activation: str,
    interpret: Any,
) -> tuple[tuple[Array, Array], Array]:
    """Runs an `op_of` kernels in this layout; see `segment`."""
    flags = (tokens.full, tokens.reset)
    full, reset = jax.tree.map(operator.methodcaller("astype", F32), flags)
    tokens = tokens._replace(full=full, reset=reset)
    static = Static(phi, activation, layout, interpret)
    return op(static, *varying.vary_alike((tokens, memory, empty)))


def op_of(kernels: Kernels) -> Callable[..., Any]:
    """The op of two kernels, (static, tokens, memory, empty) -> (memory, y)."""
    forward = functools.partial(_forward, kernels)
    backward = functools.partial(_backward, kernels)
    return gradients.of_kernels("trellis", forward, backward, _in_xla)


class Blocks(NamedTuple):
    """The arrays of `Tokens` as the kernels take them.

    Attributes:
        tokens: q, k, v, alpha, each [B, n, C, H D].
        gates: [B, n, groups, C, R] float32; see `blocks.gate_columns`.
    """

    tokens: packed.Chunk
    gates: Any


def _arrange(layout: Layout, x: Tokens) -> Blocks:
    b, n, c = x.q.shape[:3]
    columns = functools.partial(gate_columns, group=layout.group, heads=layout.heads)
    gates = [columns(x.gamma), columns(x.g)]
    flags = [flag for flag in (x.full, x.reset) if flag is not None]
    gates += [flag_columns(flag, gates[0]) for flag in flags]
    gates = jnp.concatenate(gates, axis=-1)
    chunk = packed.Chunk(*(t.reshape(b, n, c, -1) for t in (x.q, x.k, x.v, x.alpha)))
    return Blocks(chunk, gates)


def _in_blocks(layout: Layout, x: Tokens) -> Tokens:
    """Several chunks in one, and flags of every token."""
    join = functools.partial(join_chunks, parts=layout.parts)

    def of_tokens(f):
        return jnp.broadcast_to(f[..., None], x.q.shape[:3])

    flags = [f if f is None else of_tokens(f) for f in (x.full, x.reset)]
    x = x._replace(full=flags[0], reset=flags[1])
    return jax.tree.map(join, x)


def _forward(
    kernels: Kernels,
    static: Static,
    x: Tokens,
    memory: tuple[Array, Array],
    empty,
    *,
    with_residuals: bool,
):
    layout, number = static.layout, x.q.shape[1]
    x = _in_blocks(layout, x)
    blocks = _arrange(layout, x)
    join = functools.partial(pack_heads, heads=layout.heads)
    memory, empty = jax.tree.map(join, (memory, empty))
    like = functools.partial(varying.like, x.q)
    y = like((*x.q.shape[:3], x.v.shape[3] * x.v.shape[4]), x.v.dtype)
    after = jax.tree.map(lambda m: like(m.shape, F32), memory)
    dtype = kernels.residuals or x.q.dtype
    residuals = (
        jax.tree.map(
            lambda m: like((m.shape[0], x.q.shape[1], *m.shape[1:]), dtype),
            memory,
        )
        if with_residuals
        else None
    )
    of = Specs(layout.rows, layout.group, blocks.gates.shape[2], lambda i: i)
    after, y, residuals = _call(
        of,
        static,
        kernels.forward,
        "trellis_forward",
        blocks,
        inputs=(memory, empty),
        outputs=(after, y, residuals),
        specs=(
            Blocks(of.tokens(blocks.tokens), of.gates(blocks.gates)),
            of.memories(memory),
            of.memories(empty),
        ),
        out_specs=(of.memories(after), of.tokens(y), of.residuals(residuals)),
        scratch=kernels.scratch(layout, x)[0],
    )
    part = functools.partial(unpack_heads, heads=layout.heads)
    y = split_chunks(y.reshape(x.v.shape), layout.parts, number)
    return (jax.tree.map(part, after), y), residuals


def _backward(kernels: Kernels, static: Static, primals, residuals, cotangents):
    x, memory, empty = primals
    d_after, d_y = cotangents
    # Flags have no gradient.
    no_flags = jax.tree.map(jnp.zeros_like, (x.full, x.reset))
    number, layout = x.q.shape[1], static.layout
    x = _in_blocks(layout, x)
    d_y = join_chunks(d_y, layout.parts)
    blocks = _arrange(layout, x)
    b, n, c, heads, _ = x.q.shape
    of_pack = layout.heads
    join = functools.partial(pack_heads, heads=of_pack)
    memory, empty, d_after = jax.tree.map(join, (memory, empty, d_after))
    d_y = d_y.reshape(b, n, c, -1)
    like = functools.partial(varying.like, x.q)
    shaped = functools.partial(varying.like_tree, x.q)
    d_gates = like((b, n, heads // of_pack, 4, of_pack * c), F32)
    before, emptied = shaped(memory), shaped(empty)
    # The backward pass goes through the blocks in reverse.
    of = Specs(layout.rows, layout.group, blocks.gates.shape[2], lambda i: n - 1 - i)
    tokens = of.tokens(blocks.tokens)
    d_tokens, d_gates, d_memory, d_empty = _call(
        of,
        static,
        kernels.backward,
        "trellis_backward",
        blocks,
        inputs=(empty, residuals, d_after, d_y),
        outputs=(shaped(blocks.tokens), d_gates, before, emptied),
        specs=(
            Blocks(tokens, of.gates(blocks.gates)),
            of.memories(empty),
            of.residuals(residuals),
            of.memories(d_after),
            of.tokens(d_y),
        ),
        out_specs=(
            tokens,
            of.residuals(d_gates),
            of.memories(before),
            of.memories(emptied),
        ),
        scratch=kernels.scratch(layout, x)[1],
    )
    d_gamma, d_g = _gates_back(d_gates, x, of_pack)
    d_x = Tokens(
        q=d_tokens.q.reshape(x.q.shape),
        k=d_tokens.k.reshape(x.k.shape),
        v=d_tokens.v.reshape(x.v.shape),
        alpha=d_tokens.alpha.reshape(x.alpha.shape),
        gamma=d_gamma,
        g=d_g,
        full=None,
        reset=None,
    )
    d_x = jax.tree.map(lambda d: split_chunks(d, layout.parts, number), d_x)
    d_x = d_x._replace(full=no_flags[0], reset=no_flags[1])
    part = functools.partial(unpack_heads, heads=of_pack)
    return d_x, *jax.tree.map(part, (d_memory, d_empty))


def _gates_back(d_gates: Array, x: Tokens, of_pack: int) -> tuple[Array, Array]:
    """[B, n, P, 4, CC], of gamma and g in each pass, as gradients of both gates."""
    b, n, c, heads, _ = x.q.shape
    split = d_gates.reshape(b, n, heads // of_pack, 4, of_pack, c)
    by_head = split.transpose(0, 1, 5, 2, 4, 3).reshape(b, n, c, heads, 4)
    d_gamma, d_g = by_head[..., :2], by_head[..., 2:]
    if x.gamma.shape[-1] == 1:
        d_gamma = d_gamma.sum(-1, keepdims=True)
    if x.g.shape[-1] == 1:
        d_g = d_g.sum(-1, keepdims=True)
    # Gates clamped to the lowest have no gradient.
    return d_gamma, jnp.where(x.g > FORGETS_ALL, d_g, 0.0)


def _in_xla(static: Static, x: Tokens, memory, empty):
    """The function of the forward kernel."""
    full, reset = jax.tree.map(lambda f: f > 0.5, (x.full, x.reset))
    x = x._replace(full=full, reset=reset)
    return trellis_xla(x, memory, empty, phi=static.phi, activation=static.activation)


def _call(of: Specs, static: Static, kernel, name, x: Blocks, **blocks):
    dtype = products.operand_dtype(x.tokens.q)
    multiply = functools.partial(pack_products.multiply, dtype=dtype)
    options = Options(static.phi, static.activation, multiply)
    kernel = functools.partial(kernel, layout=static.layout, options=options)
    return of.call(kernel, name, x, **blocks, interpret=static.interpret)
