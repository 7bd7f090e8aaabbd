"""A mini-batch of TTT-linear for packed heads, and its gradient, on a TPU.

`mini_batch` has the same equations for any leading axes. Here arrays have a leading
axis of P packs of heads (`common.packs`): tokens are [P, C, VV], weights [P, V, VV],
and pairs of tokens [P, C, CC]. With D(.) `packs.block_diagonal`, n and i what LN makes
of x, mean over a head's lanes:

    LN(x):  c = x - mean(x),  i = (mean(c c) + eps)^{-1/2},  n = c i
    n, i of k D(W) + b,  e = (n s + t - (v - k)) s
    u = -eta i (e - mean(e) - mean(e n) n)
    A = lower(q D(k)^T + 1),  y = q + LN(q D(W) + b + A D(u)) s + t
    W' = W + k^T u,  b' = b + sum u

The gradient is by hand, to read transposed operands as they are, and to choose what is
computed again.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import packs
from memjax_kernels._src.common.packs import block_diagonal, diagonal_blocks, lower
from memjax_kernels._src.common.packs.chunk_kernels import Chunk, Cotangents, Equations
from memjax_kernels._src.common.products import Multiply
from memjax_kernels._src.ttt_linear.mini_batch import EPSILON

F32 = jnp.float32


class Memory(NamedTuple):
    """W, and the rows b, s and t: what is trained of them is b alone."""

    weights: Float[Array, "P V VV"]
    rows: Float[Array, "P 3 VV"]


class Products(NamedTuple):
    """Heads of a pack, and the product of packs."""

    heads: int
    dot: Multiply


class Written(NamedTuple):
    """The update of a mini-batch: LN of the prediction, its error, and u."""

    normal: Float[Array, "P C VV"]
    inverse: Float[Array, "P C VV"]
    error: Float[Array, "P C VV"]
    along: Float[Array, "P C VV"]
    slope: Float[Array, "P C VV"]
    update: Float[Array, "P C VV"]


class Read(NamedTuple):
    """A, and LN of the reads before scale and shift."""

    overlap: Float[Array, "P C CC"]
    normal: Float[Array, "P C VV"]
    inverse: Float[Array, "P C VV"]


def equations(_: None, heads: int, multiply: Multiply) -> Equations:
    """The equations for the kernels."""
    of = Products(heads, multiply)
    advance = functools.partial(_advance, of=of)
    return Equations(advance, functools.partial(_vjp, of=of))


def _advance(x: Chunk, memory: Memory, *, of: Products):
    """The memory after a mini-batch, and its reads."""
    bias, scale, shift = _rows(memory)
    weights, k = block_diagonal(memory.weights, of.heads), x.k.astype(F32)
    written = yield from _write(x, k, weights, memory, of)
    read = yield from _read(x, weights, written.update, bias, of)
    y = x.q.astype(F32) + read.normal * scale + shift
    yield
    added = diagonal_blocks(of.dot(x.k, written.update, "tn"), of.heads)
    trained = bias + written.update.sum(axis=1, keepdims=True)
    rows = jnp.concatenate([trained, scale, shift], axis=1)
    return Memory(memory.weights + added, rows), y


def _write(x: Chunk, k, weights, memory: Memory, of: Products):
    bias, scale, shift = _rows(memory)
    mean = functools.partial(_mean, heads=of.heads)
    hidden = of.dot(x.k, weights, "nn") + bias
    yield
    normal, inverse = _normalise(hidden, of.heads)
    yield
    error = normal * scale + shift - (x.v.astype(F32) - k)
    scaled = error * scale
    along = mean(scaled * normal)
    yield
    slope = inverse * (scaled - mean(scaled) - along * normal)
    return Written(normal, inverse, error, along, slope, -x.gate * slope)


def _read(x: Chunk, weights, update, bias, of: Products):
    overlap = lower(of.dot(x.q, block_diagonal(x.k, of.heads), "nt") + 1.0, of.heads)
    yield
    hidden = of.dot(x.q, weights, "nn") + bias
    hidden += of.dot(overlap, block_diagonal(update, of.heads), "nn")
    yield
    return Read(overlap, *_normalise(hidden, of.heads))


def _vjp(x: Chunk, memory: Memory, d_after: Memory, d_y, *, of: Products):
    """The cotangents of a mini-batch, which is computed again from its memory."""
    dot, heads = of.dot, of.heads
    blocks = functools.partial(diagonal_blocks, heads=heads)
    bias, scale, _ = _rows(memory)
    weights, k = block_diagonal(memory.weights, heads), x.k.astype(F32)
    written = yield from _write(x, k, weights, memory, of)
    read = yield from _read(x, weights, written.update, bias, of)
    yield
    d_y = d_y.astype(F32)
    d_hidden = _normalise_vjp(d_y * scale, read.normal, read.inverse, heads)
    yield

    # What is read: A, u and W.
    d_overlap = lower(dot(d_hidden, block_diagonal(written.update, heads), "nt"), heads)
    yield
    d_trained, *d_norm = _rows(d_after)
    d_weights = block_diagonal(d_after.weights, heads)
    d_update = blocks(dot(read.overlap, d_hidden, "tn")) + d_trained
    d_update += dot(x.k, d_weights, "nn")
    yield

    # The update: G, and through it LN's own n and i.
    mean = functools.partial(_mean, heads=heads)
    d_slope = -x.gate * d_update
    d_inner = written.inverse * d_slope
    normal, error = written.normal, written.error
    crossed = mean(d_inner * normal)
    yield
    d_scaled = d_inner - mean(d_inner) - crossed * normal
    d_error = d_scaled * scale
    d_normal = d_error * scale - written.along * d_inner - crossed * (error * scale)
    yield
    more = d_slope * written.slope
    d_first = _normalise_vjp(d_normal, normal, written.inverse, heads, more)
    yield
    d_q = d_y + dot(d_hidden, weights, "nt")
    d_q += dot(d_overlap, block_diagonal(x.k, heads), "nn")
    yield
    d_k = dot(d_first, weights, "nt") + dot(written.update, d_weights, "nt") + d_error
    d_k += blocks(dot(d_overlap, x.q, "tn"))
    yield
    tokens = jnp.concatenate([x.q, x.k], axis=1)
    added = blocks(dot(tokens, jnp.concatenate([d_hidden, d_first], axis=1), "tn"))
    d_scale = d_y * read.normal + d_scaled * error + d_error * normal
    sums = (d_hidden + d_first, d_scale, d_y + d_error)
    after = d_trained, *d_norm
    rows = [d + x.sum(axis=1, keepdims=True) for d, x in zip(after, sums, strict=True)]
    d_memory = Memory(d_after.weights + added, jnp.concatenate(rows, axis=1))
    d_gate = -d_update * written.slope
    return Cotangents((d_q, d_k, -d_error), d_gate, d_memory)


def _rows(memory: Memory) -> list[Float[Array, "P 1 VV"]]:
    return jnp.split(memory.rows, 3, axis=1)


def _normalise(x: Float[Array, "P C VV"], heads: int) -> tuple[Array, Array]:
    centred = x - _mean(x, heads)
    inverse = jax.lax.rsqrt(_mean(centred * centred, heads) + EPSILON)
    return centred * inverse, inverse


def _normalise_vjp(d, normal, inverse, heads: int, more: Array | float = 0.0) -> Array:
    """The cotangent of x from that of its normal form, and `more` of 1 / i times i."""
    return inverse * (d - _mean(d, heads) - normal * _mean(d * normal + more, heads))


def _mean(x: Float[Array, "P C VV"], heads: int) -> Float[Array, "P C VV"]:
    """The mean over each head's lanes, in all of them."""
    width = x.shape[-1]
    means = [total * (heads / width) for total in packs.sums(x, heads)]
    return packs.widen(means, width)
