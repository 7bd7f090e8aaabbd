"""The overlap of keys on a TPU, in packed heads, without a copy of the keys.

A block has the pairs of all its tokens, whole chunks; those of two chunks are left out
by a mask. Rows are the earlier tokens s, lanes the later ones t of each head
(`common.packs`), and the gradient of the pairs L_st = log(1 - γ_s a_st²) is by hand:

    dx_st = -d left_t Π_r≠s (1 - γ_r a_rt²)            x = γ a²
    dγ_s = Σ_t dx_st a_st²        da = 2 γ dx a        dk_s = Σ_t da_st k_t + da_ts k_t
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from memjax_kernels._src.common import chunks, gradients, packs, partition, varying
from memjax_kernels._src.common.packs import block_diagonal, diagonal_blocks
from memjax_kernels._src.common.packs import columns as pack_columns
from memjax_kernels._src.common.packs.blocks import (
    LANES,
    PARAMS,
    ROWS,
    Specs,
    divisor,
    gate_columns,
    gates_of_columns,
    group_size,
    packings,
)
from memjax_kernels._src.common.products import multiply, operand_dtype
from memjax_kernels._src.overlap.xla import LEAST, in_chunks

F32 = jnp.float32
# Least tokens of a block: pairs of tokens of two heads fill the lanes.
LEAST_BLOCK = 64
# Packs of a program, at most: one hides the latency of another.
PACKS_OF_PROGRAM = 24


class Static(NamedTuple):
    """Static arguments of the kernels."""

    chunk_size: int
    rows: int
    group: int
    heads: int
    interpret: Any


class Tokens(NamedTuple):
    """Keys and rates in blocks."""

    k: Any
    gamma: Any


class Pairs(NamedTuple):
    """Of tokens s, along the sublanes, and later ones t of each head, along the lanes.

    Attributes:
        alike: products of their keys, 0 where they are no pair of a chunk.
        gamma: of token s.
        left: what s leaves of t.
    """

    alike: Float[Array, "P N NN"]
    gamma: Float[Array, "P N NN"]
    left: Float[Array, "P N NN"]


def unsupported(k: Any, chunk_size: int) -> str:
    """Why the kernels cannot take these arguments on any TPU; "" if they can."""
    if k.dtype not in (jnp.float32, jnp.bfloat16):
        return f"k must be float32 or bfloat16, got {k.dtype}"
    if k.shape[1] < LEAST_BLOCK:
        return f"{k.shape[1]} tokens are less than a block of {LEAST_BLOCK}"
    if chunk_size > LANES:
        return f"a chunk of {chunk_size} is more than {LANES} tokens"
    if not _heads(k, _block(chunk_size)):
        return f"no number of {k.shape[2]} heads of {k.shape[3]} fills {LANES} lanes"
    return ""


def overlap_tpu(
    k: Float[Array, "B T H K"],
    gamma: Float[Array, "B T H"],
    *,
    chunk_size: int,
    interpret: Any = False,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """`overlap_with_keys` in kernels."""

    def split(x):
        return chunks.split(x, _block(chunk_size), None)

    form = functools.partial(_on_device, chunk_size=chunk_size, interpret=interpret)
    _, found = partition.chunkwise(form)(Tokens(split(k), split(gamma)))
    keys, left = (chunks.join(x, k.shape[1], None) for x in found)
    return keys, left


def _block(chunk_size):
    """Tokens of a block: whole chunks, and whole registers of 2 bytes."""
    step = math.lcm(chunk_size, ROWS)
    return step * -(-LEAST_BLOCK // step)


def _heads(k, size):
    """Heads of a pack, as few as fill the lanes; 0 is none."""
    return min(packings(k.shape[-2], (k.shape[-1], size), _bytes(k, size)), default=0)


def _bytes(k, size):
    """Estimate of the backward kernel's VMEM for one head, in bytes."""
    return 4 * size * (8 * k.shape[-1] + 8 * size)


def _on_device(tokens, *, chunk_size, interpret):
    shape = tokens.k.shape
    tokens, size = _in_smaller_blocks(tokens, chunk_size)
    heads = _heads(tokens.k, size)
    if not heads:
        # A device of a mesh may hold heads that fill no lanes.
        return (), _in_xla(Static(chunk_size, 0, 0, 0, None), tokens)
    packs_of_all = tokens.k.shape[3] // heads
    group = group_size(packs_of_all, heads * _bytes(tokens.k, size))
    # Blocks do not depend on each other: a program takes some as batch elements.
    tokens = jax.tree.map(lambda x: x.reshape(-1, 1, *x.shape[2:]), tokens)
    rows = divisor(tokens.k.shape[0], max(1, PACKS_OF_PROGRAM // group))
    static = Static(chunk_size, rows, group, heads, interpret)
    keys, left = _blocks(static, varying.vary_alike(tokens))
    return (), (keys.reshape(shape), left.reshape(shape[:-1]))


def _in_smaller_blocks(x, chunk_size):
    """Half of each block, if whole chunks and heads fill that too: it has fewer pairs
    that are of different chunks.
    """
    half = x.k.shape[2] // 2
    if half % math.lcm(chunk_size, ROWS) or not _heads(x.k, half):
        return x, 2 * half
    return jax.tree.map(
        lambda y: y.reshape(y.shape[0], -1, half, *y.shape[3:]), x
    ), half


def _arrange(static, x):
    """Keys [B, n, N, H K], and rates as columns."""
    k = x.k.reshape(*x.k.shape[:3], -1)
    return Tokens(k, gate_columns(x.gamma, static.group, static.heads))


def _forward(static: Static, x: Tokens, *, with_residuals: bool):
    del with_residuals
    (b, n, size, number), heads = x.gamma.shape, static.heads
    rows = varying.like(x.k, (b, n, number // heads, 1, heads * size), F32)
    left = _call(static, _forward_kernel, "overlap_forward", x, (), rows)
    by_token = left.reshape(b, n, number, size).swapaxes(2, 3)
    return (x.k, by_token), None


def _backward(static: Static, primals, residuals, cotangents):
    del residuals
    (x,), (d_k, d_left) = primals, cotangents
    (b, n, size, number), heads = x.gamma.shape, static.heads
    d_left = d_left.swapaxes(2, 3).reshape(b, n, number // heads, 1, heads * size)
    outputs = jax.tree.map(
        lambda y: varying.like(x.k, y.shape, y.dtype), _arrange(static, x)
    )
    given = (x, (d_k.reshape(*d_k.shape[:3], -1), d_left))
    d = _call(static, _backward_kernel, "overlap_backward", *given, outputs)
    d_gamma = gates_of_columns(d.gamma, static.group, heads)[..., 0]
    return (Tokens(d.k.reshape(x.k.shape), d_gamma),)


def _in_xla(static: Static, x: Tokens):
    """The function of the forward kernel."""

    def cut(y):
        return y.reshape(y.shape[0], -1, static.chunk_size, *y.shape[3:])

    left = in_chunks(cut(x.k), cut(x.gamma))
    return x.k, left.reshape(x.gamma.shape)


_blocks = gradients.of_kernels("overlap", _forward, _backward, _in_xla)


def _call(static: Static, kernel, name, x: Tokens, more, outputs):
    groups = x.k.shape[3] // static.group // static.heads
    of = Specs(static.rows, static.group, groups, lambda i: i)

    def both(t):
        return Tokens(of.tokens(t.k), of.gates(t.gamma))

    spec = both if isinstance(outputs, Tokens) else of.residuals
    # Cotangents of the keys, laid out as tokens, and of the overlap.
    specs = (of.tokens, of.residuals)[: len(more)]
    blocks = _arrange(static, x)
    (result,) = pl.pallas_call(
        functools.partial(kernel, static=static),
        grid=(x.k.shape[0] // static.rows, groups, 1),
        in_specs=(both(blocks), *(at(y) for at, y in zip(specs, more, strict=True))),
        out_specs=(spec(outputs),),
        out_shape=(outputs,),
        compiler_params=PARAMS,
        interpret=static.interpret,
        name=name,
    )(blocks, *more)
    return result


def _pairs(k, columns, static):
    """The pairs of a block's tokens."""
    size = k.shape[1]
    dot = functools.partial(multiply, dtype=operand_dtype(k))
    alike = dot(k, block_diagonal(k, static.heads), "nt")
    gamma = pack_columns.spread(columns, alike.shape[-1], static.group, static.heads)
    earlier, later = packs.sublane(alike.shape), packs.within(alike.shape, size)

    def chunk(at):
        return jax.lax.div(at, jnp.int32(static.chunk_size))

    seen = (later > earlier) & (chunk(later) == chunk(earlier))
    alike = jnp.where(seen, alike, 0.0)
    return Pairs(alike, gamma, jnp.maximum(1 - gamma * alike * alike, LEAST))


def _forward_kernel(x, left, *, static: Static):
    pairs = _pairs(packs.load_rows(x.k, static.group), x.gamma[...], static)
    found = jnp.exp(packs.sum_slots(jnp.log(pairs.left)))
    left[...] = found.reshape(left.shape)


def _backward_kernel(x, d_keys, d_left, d_x, *, static: Static):
    k, heads = packs.load_rows(x.k, static.group), static.heads
    dot = functools.partial(multiply, dtype=operand_dtype(k))
    pairs = _pairs(k, x.gamma[...], static)
    logs = jnp.log(pairs.left)
    # The product over all other earlier tokens.
    others = jnp.exp(packs.sum_slots(logs) - logs)
    d_pair = -packs.each_pack(d_left[...]) * others * pairs.alike
    shape = d_x.gamma.shape
    d_x.gamma[...] = pack_columns.sum_lanes(
        d_pair * pairs.alike, shape, static.group, heads
    )
    d_alike = 2 * pairs.gamma * d_pair
    d_k = dot(d_alike, block_diagonal(k, heads), "nn") + diagonal_blocks(
        dot(d_alike, k, "tn"), heads
    )
    packs.store_rows(d_x.k, packs.load_rows(d_keys, static.group) + d_k)
