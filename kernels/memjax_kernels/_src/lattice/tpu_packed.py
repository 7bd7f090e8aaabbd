"""Lattice on a TPU for packed heads, without a copy of the tokens.

All packs of a program are computed in step, so that one hides the latency of another.
The memory is an output block that all chunks of a head share: it stays in VMEM from the
first chunk to the last. `packed` has the equations of a chunk.

The forward kernel also saves the memory at every chunk's start where a gradient is
taken, in the dtype of the tokens. The backward kernel goes through the chunks in
reverse and computes each again from there.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from memjax_kernels._src.common import gradients, products, varying
from memjax_kernels._src.common.packs import pack_products
from memjax_kernels._src.common.packs.blocks import (
    BLOCK_BYTES,
    ROWS,
    Specs,
    divisor,
    flag_columns,
    gate_columns,
    gates_of_columns,
    group_size,
    pack_heads,
    packings,
    unpack_heads,
)
from memjax_kernels._src.lattice import tpu_packed_kernels
from memjax_kernels._src.lattice.memory import Rule
from memjax_kernels._src.lattice.packed import Options
from memjax_kernels._src.lattice.segment import Chunks
from memjax_kernels._src.lattice.tpu_packed_kernels import Layout
from memjax_kernels._src.lattice.xla import lattice_xla

F32 = jnp.float32
# At most: batch elements of a program, and tokens of all packs that go through phases
# in step. A short chunk alone waits for its products.
BATCH, TOKENS = 4, 256


class Static(NamedTuple):
    """Static arguments of the kernels."""

    rule: Rule
    layout: Layout
    interpret: Any


class Tokens(NamedTuple):
    """q, k and v, each [B, n, C, H D]."""

    q: Any
    k: Any
    v: Any


class Blocks(NamedTuple):
    """A segment as the kernels take it; gates are [B, n, groups, C, R] float32."""

    tokens: Tokens
    gates: Any


def fits(tokens: Chunks) -> bool:
    """Whether packs of heads fill full registers, and one fits in VMEM."""
    return tokens.q.shape[2] % ROWS == 0 and _heads(tokens) > 0


def _heads(tokens: Chunks) -> int:
    """Heads of a pack, as few as fill the lanes; 0 is none."""
    (*_, size, heads, slots), width = tokens.q.shape, tokens.v.shape[4]
    each = _block_bytes(size, slots, width)
    return min(packings(heads, (slots, width), each), default=0)


def _block_bytes(size: int, slots: int, width: int) -> int:
    """Estimate of the backward kernel's VMEM for one head, in bytes."""
    # In float32. Two buffers of each block in and out: tokens and their cotangents, and
    # 10 of a memory; and the values in between: 8 arrays of a memory, 20 of a token's
    # slots, 6 of its channels, 4 of pairs of tokens.
    tokens = size * (2 * slots + 2 * width) * 4
    memories = slots * width * (10 + 8)
    between = size * (20 * slots + 6 * width + 4 * size)
    return 4 * (tokens + memories + between)


def lattice_packed(
    tokens: Chunks, start: Array, empty: Array, rule: Rule, *, interpret: Any = False
) -> tuple[Array, Array]:
    """A chunk implementation for tokens that `fits` takes; see `segment`."""
    heads = _heads(tokens)
    (b, _, size, number, slots), width = tokens.q.shape, tokens.v.shape[4]
    each = heads * _block_bytes(size, slots, width)
    group = group_size(number // heads, each)
    # Batch elements of a program, each with its tokens in all packs.
    most = BLOCK_BYTES // (group * each)
    rows = divisor(b, min(BATCH, most))
    phased = rows // divisor(rows, max(1, TOKENS // (group * size)))
    layout = Layout(rows, group, heads, tokens.reset is not None, phased)
    floats = (tokens.gamma, tokens.full, tokens.reset)
    gamma, full, reset = jax.tree.map(operator.methodcaller("astype", F32), floats)
    tokens = tokens._replace(gamma=gamma, full=full, reset=reset)
    static = Static(rule, layout, interpret)
    return _chunks(static, *varying.vary_alike((tokens, start, empty)))


def _arrange(static: Static, x: Chunks) -> Blocks:
    gates = [gate_columns(x.gamma, static.layout.group, static.layout.heads)]
    flags = [flag for flag in (x.full, x.reset) if flag is not None]
    gates += [flag_columns(flag, gates[0]) for flag in flags]
    tokens = Tokens(*(t.reshape(*t.shape[:3], -1) for t in (x.q, x.k, x.v)))
    return Blocks(tokens, jnp.concatenate(gates, axis=-1))


def _forward(static: Static, x: Chunks, start, empty, *, with_residuals: bool):
    blocks = _arrange(static, x)
    join = functools.partial(pack_heads, heads=static.layout.heads)
    start, empty = join(start), join(empty)
    like = functools.partial(varying.like, x.q)
    y = like(blocks.tokens.v.shape, x.v.dtype)
    after = like(start.shape, F32)
    # In the tokens' dtype, to which the operands of products are rounded anyway.
    shape = (start.shape[0], x.q.shape[1], *start.shape[1:])
    residuals = like(shape, x.q.dtype) if with_residuals else None
    of = Specs(
        static.layout.rows, static.layout.group, blocks.gates.shape[2], lambda i: i
    )
    after, y, residuals = _call(
        of,
        static,
        tpu_packed_kernels.forward_kernel,
        "lattice_forward",
        blocks,
        inputs=(start, empty),
        outputs=(after, y, residuals),
        specs=(_specs(of, blocks), of.memories(start), of.memories(empty)),
        out_specs=(of.memories(after), of.tokens(y), of.residuals(residuals)),
    )
    after = unpack_heads(after, static.layout.heads)
    return (after, y.reshape(x.v.shape)), residuals


def _backward(static: Static, primals, residuals, cotangents):
    x, _, empty = primals
    d_after, d_y = cotangents
    blocks = _arrange(static, x)
    heads, group = static.layout.heads, static.layout.group
    join = functools.partial(pack_heads, heads=heads)
    empty, d_after = join(empty), join(d_after)
    d_y = d_y.reshape(blocks.tokens.v.shape)
    like = functools.partial(varying.like, x.q)
    shaped = functools.partial(varying.like_tree, x.q)
    n, memory = x.q.shape[1], shaped(empty)
    d_gates = like((*blocks.gates.shape[:4], heads * group), F32)
    # The backward pass goes through the chunks in reverse.
    of = Specs(static.layout.rows, group, blocks.gates.shape[2], lambda i: n - 1 - i)
    d_tokens, d_gates, d_start, d_empty = _call(
        of,
        static,
        tpu_packed_kernels.backward_kernel,
        "lattice_backward",
        blocks,
        inputs=(empty, residuals, d_after, d_y),
        outputs=(shaped(blocks.tokens), d_gates, memory, memory),
        specs=(
            _specs(of, blocks),
            of.memories(empty),
            of.residuals(residuals),
            of.memories(d_after),
            of.tokens(d_y),
        ),
        out_specs=(
            of.tokens(blocks.tokens),
            of.gates(d_gates),
            *of.memories((memory, memory)),
        ),
    )
    d_x = Chunks(
        q=d_tokens.q.reshape(x.q.shape),
        k=d_tokens.k.reshape(x.k.shape),
        v=d_tokens.v.reshape(x.v.shape),
        gamma=gates_of_columns(d_gates, group, heads),
        g=None,
        # Flags have no gradient.
        full=jnp.zeros_like(x.full),
        reset=None if x.reset is None else jnp.zeros_like(x.reset),
    )
    return d_x, unpack_heads(d_start, heads), unpack_heads(d_empty, heads)


def _in_xla(static: Static, x: Chunks, start, empty):
    """The function of the forward kernel."""
    full, reset = jax.tree.map(lambda f: f > 0.5, (x.full, x.reset))
    x = x._replace(full=full, reset=reset)
    return lattice_xla(x, start, empty, static.rule)


_chunks = gradients.of_kernels("lattice", _forward, _backward, _in_xla)


def _specs(of: Specs, x: Blocks) -> Blocks:
    return Blocks(of.tokens(x.tokens), of.gates(x.gates))


def _call(of: Specs, static: Static, kernel, name, x: Blocks, **blocks):
    dtype = products.operand_dtype(x.tokens.q)
    multiply = functools.partial(pack_products.multiply, dtype=dtype)
    options = Options(static.rule.variant, static.layout.heads, multiply)
    kernel = functools.partial(kernel, layout=static.layout, options=options)
    return of.call(kernel, name, x, **blocks, interpret=static.interpret)
