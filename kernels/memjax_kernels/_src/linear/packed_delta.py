"""One chunk of the gated delta rule for packed heads, and its gradient.

`delta_chunks` has the same equations. Arrays have a leading axis of P packs of
heads (`common.packs`), and every product is one of each head's matrices.
With W the decays between tokens, L those to later tokens alone, since and until the
decays from the chunk's start and to its end:

    E = V - since K S - (K K^T L) U      the prediction errors
    U = beta E                           so (I + beta K K^T L) U = beta (V - since K S)
    Y = (Q K^T W) U + since Q S          S' = last S + (until K)^T U

The gradient of a gate's sum at token i is the reads of q_i and k_i less the write of
k_i.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import packs
from memjax_kernels._src.common.packs.blocks import LANES
from memjax_kernels._src.common.packs.chunk_kernels import Cotangents
from memjax_kernels._src.common.packs.pack_products import multiply
from memjax_kernels._src.common.packs.recurrence_chunk import (
    Channels,
    Chunk,
    Gates,
    at_end,
)
from memjax_kernels._src.common.products import Form, Multiply, operand_dtype

F32 = jnp.float32
# Tokens of a block that is inverted without products: a register's rows.
BLOCK = 8


class Solved(NamedTuple):
    """Writes of a chunk.

    Attributes:
        between: decays W from token j (lanes) to token i.
        scores: Q K^T W.
        later: K K^T with the decays L, zero on the diagonal.
        inverse: of I + beta K K^T L.
        target: V - since K S.
        writes: U.
    """

    between: Float[Array, "P C CC"]
    scores: Float[Array, "P C CC"]
    later: Float[Array, "P C CC"]
    inverse: Float[Array, "P C CC"]
    target: Float[Array, "P C VV"]
    writes: Float[Array, "P C VV"]


def advance(
    x: Chunk, start: Float[Array, "P K VV"]
) -> tuple[Float[Array, "P K VV"], Float[Array, "P C VV"]]:
    """The memory after a chunk, and its reads."""
    read, exact = products(x)
    overlaps = _overlaps(x, read)
    # Queries above keys: the memory is loaded once.
    large, *small = parts_of(start, operand_dtype(x.k))
    past, known = jnp.split(read(rows(x.q, x.k), large, "nn"), 2, axis=1)
    known = functools.reduce(jnp.add, [read(x.k, s, "nn") for s in small], known)
    solved = _solve(x, overlaps, known, read, exact)
    width = start.shape[-1]
    y = read(solved.scores, solved.writes, "nn") + x.since(width) * past
    written = exact(x.k, x.until(width) * solved.writes, "tn")
    return x.whole(width) * start + written, y


def vjp(
    x: Chunk,
    start: Float[Array, "P K VV"],
    d_after: Float[Array, "P K VV"],
    d_y: Float[Array, "P C VV"],
) -> Cotangents:
    """The cotangents of a chunk, which is computed again from its memory."""
    read, exact = products(x)
    overlaps, known = _overlaps(x, read), exact(x.k, start, "nn")
    between, scores, later, inverse, target, writes = _solve(
        x, overlaps, known, read, exact
    )
    of_keys, width = x.k.shape[-1], start.shape[-1]
    since, until = x.since(width), x.until(width)
    d_writes = read(scores, d_y, "tn") + until * exact(x.k, d_after, "nn")
    d_solved = exact(inverse, d_writes, "tn")
    d_target = x.beta(width) * d_solved

    # Cotangents of queries above those of keys: both are multiplied by one matrix.
    d_both = rows(d_y, -d_target)
    d_overlaps = read(d_both, writes, "nt") * rows(between, _below(between))
    past = rows(x.since(of_keys), x.since(of_keys)) * read(d_both, start, "nt")
    q_reads, k_reads = jnp.split(read(d_overlaps, x.k, "nn") + past, 2, axis=1)
    carried = x.until(of_keys) * read(writes, d_after, "nt")
    k_writes = read(d_overlaps, rows(x.q, x.k), "tn") + carried
    decay = x.whole(width) * d_after
    d_start = decay + read(x.q, since * d_y, "tn") - exact(x.k, since * d_target, "tn")

    q, k, size = x.q.astype(F32), x.k.astype(F32), x.q.shape[1]
    d_gates = Gates(
        sums=(
            q * q_reads + k * (k_reads - k_writes) + at_end(k * carried, size),
            at_end(decay * start, size),
        ),
        # A small difference, where the memory knows what comes.
        beta=d_solved * (target - exact(later, writes, "nn")),
    )
    return Cotangents((q_reads, k_reads + k_writes, d_target), d_gates, d_start)


def _overlaps(x: Chunk, read: Multiply) -> Float[Array, "P rows CC"]:
    """Q K^T above K K^T, whose second operand is loaded once."""
    return read(rows(x.q, x.k), x.k, "nt")


def _solve(
    x: Chunk,
    overlaps: Float[Array, "P rows CC"],
    known: Float[Array, "P C VV"],
    read: Multiply,
    exact: Multiply,
) -> Solved:
    """The writes, where the memory has `known` of the keys, K S."""
    of_q, of_k = jnp.split(overlaps, 2, axis=1)
    between = x.between()
    later = of_k * _below(between)
    inverse = inverse_of(x.beta(later.shape[-1]) * later, x.heads, operand_dtype(x.k))
    width = known.shape[-1]
    target = x.v - x.since(width) * known
    writes = exact(inverse, x.beta(width) * target, "nn")
    return Solved(between, of_q * between, later, inverse, target, writes)


def rows(*parts: Array) -> Array:
    """One above the other."""
    return jnp.concatenate(parts, axis=1)


def _sum_rows(x: Array, parts: int) -> Array:
    """The sum of equal blocks of rows."""
    return functools.reduce(jnp.add, jnp.split(x, parts, axis=1))


def _below(x: Float[Array, "P C CC"]) -> Float[Array, "P C CC"]:
    """Zero on the diagonal of each head."""
    return jnp.where(packs.sublane(x.shape) == _other(x), 0.0, x)


def inverse_of(
    lower: Float[Array, "P C CC"], heads: int, dtype: jnp.dtype
) -> Float[Array, "P C CC"]:
    """(I + L)⁻¹ of each head, L below the diagonal, C a power of two.

    The inverse of blocks on the diagonal gives that of blocks twice as large, as in
    `linear.triangular`, here of all blocks at once. Beside tokens in bfloat16 it is
    found in bfloat16, and a step of Newton's method, T + T (I - (I + L) T), squares
    what is wrong with it.
    """
    if heads * lower.shape[1] < LANES and len(lower) % 2 == 0:
        # Two packs beside each other fill the lanes, and products of both are one.
        joined = jnp.concatenate(jnp.split(lower, 2), axis=2)
        found = inverse_of(joined, 2 * heads, dtype)
        return jnp.concatenate(jnp.split(found, 2, axis=2))
    read = functools.partial(multiply, dtype=dtype, heads=heads)
    # Its highest bit is the size of the block that is too small for both tokens.
    apart = packs.sublane(lower.shape) ^ _other(lower)
    ones = (apart == 0).astype(F32)
    inverse, size = _invert_blocks(lower), BLOCK
    while size < lower.shape[1]:
        corner = jnp.where((apart >= size) & (apart < 2 * size), lower, 0.0)
        # Rows of late halves alone are not zero.
        parts = jnp.split(inverse, lower.shape[1] // size, axis=1)
        late = rows(*parts[1::2])
        late -= read(read(late, corner, form="nn"), inverse, form="nn")
        parts[1::2] = jnp.split(late, len(parts) // 2, axis=1)
        inverse, size = rows(*parts), 2 * size
    if dtype == F32:
        return inverse
    coarse, _ = packs.in_bfloat16(inverse, 2)
    both = rows(*packs.in_bfloat16(lower, 2))
    wrong = ones - coarse - _sum_rows(read(both, coarse, form="nn"), 2)
    return coarse + read(coarse, wrong, form="nn")


def _invert_blocks(lower: Float[Array, "P C CC"]) -> Float[Array, "P C CC"]:
    """(I + L)⁻¹ of blocks of `BLOCK` tokens: forward substitution, in float32."""
    count, size, width = lower.shape
    own = jax.lax.div(_other(lower), jnp.int32(BLOCK))[:, :BLOCK]
    parts = jnp.split(lower, size // BLOCK, axis=1)
    # The blocks of all heads beside each other, in as few registers as hold them.
    kept = [jnp.where(own == i, x, 0.0) for i, x in enumerate(parts)]
    wide = jnp.concatenate([*functools.reduce(jnp.add, kept)], axis=1)
    lanes = math.gcd(count * width, LANES)
    blocks = jnp.split(wide, count * width // lanes, axis=1)
    within = packs.within((BLOCK, lanes), BLOCK)
    row, first = packs.sublane(within.shape), packs.lane(within.shape) - within

    def invert(block):
        inverse = (row == within).astype(F32)
        for i in range(BLOCK - 1):
            column = jnp.take_along_axis(
                block, first + i, axis=1, mode="promise_in_bounds"
            )
            inverse -= column * inverse[i : i + 1]
        return inverse

    wide = jnp.concatenate([invert(block) for block in blocks], axis=1)
    inverse = jnp.stack(jnp.split(wide, count, axis=1))
    return rows(*(jnp.where(own == i, inverse, 0.0) for i in range(len(parts))))


def _other(x: Float[Array, "P C CC"]):
    """The token of each lane."""
    return packs.within(x.shape, x.shape[1])


def products(x: Chunk | Channels) -> tuple[Multiply, Multiply]:
    """Products for reads in the tokens' dtype, and those for the memory.

    Errors of a write, and of its cotangent, grow through the solution and from chunk to
    chunk: there operands beside tokens in bfloat16 have 16 bits, in two parts.
    """
    heads, dtype = x.heads, operand_dtype(x.q)

    def read(x: Array, y: Array, form: Form):
        return multiply(x, y, form, dtype, heads)

    def exact(x: Array, y: Array, form: Form):
        # That of both small parts is left out.
        xs, ys = (parts_of(z, dtype) for z in (x, y))
        if form == "tn":
            # One product over all tokens of both.
            pairs = [(a, b) for i, a in enumerate(xs) for b in ys[: 2 - i]]
            return read(
                rows(*(a for a, _ in pairs)), rows(*(b for _, b in pairs)), form
            )
        if len(ys) == 2 and heads == 1 and 2 * x.shape[-1] <= LANES and form == "nn":
            # Both parts of the second operand fill the unit's rows.
            wide = jnp.concatenate([xs[0], xs[0]], axis=2)
            return read(wide, rows(*ys), form) + read(xs[1], ys[0], form)
        # A second operand is loaded once.
        large, *small = ys
        found = _sum_rows(read(rows(*xs), large, form), len(xs))
        return functools.reduce(jnp.add, [read(xs[0], y, form) for y in small], found)

    return read, exact


def parts_of(x: Array, dtype: jnp.dtype) -> list[Array]:
    """Parts in `dtype` whose sum is x but for its last bits."""
    return [x] if x.dtype == dtype else packs.in_bfloat16(x, 2)
