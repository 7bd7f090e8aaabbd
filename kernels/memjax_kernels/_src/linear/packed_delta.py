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
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import packs
from memjax_kernels._src.common.packs import decays as pack_decays
from memjax_kernels._src.common.packs.recurrence_kernels import (
    Chunk,
    Cotangents,
    at_end,
)
from memjax_kernels._src.common.products import Form, Multiply, multiply, operand_dtype

F32 = jnp.float32


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
    read, exact = _products(x)
    solved = _solve(x, start, read, exact)
    width = start.shape[-1]
    y = read(solved.scores, solved.writes, "nn")
    y += x.since(width) * read(x.q, start, "nn")
    written = exact(x.k, x.until(width) * solved.writes, "tn")
    return pack_decays.decay_at_end(x.total, width) * start + written, y


def vjp(
    x: Chunk,
    start: Float[Array, "P K VV"],
    d_after: Float[Array, "P K VV"],
    d_y: Float[Array, "P C VV"],
) -> Cotangents:
    """The cotangents of a chunk, which is computed again from its memory."""
    read, exact = _products(x)
    between, scores, later, inverse, target, writes = _solve(x, start, read, exact)
    of_keys, width = x.k.shape[-1], start.shape[-1]
    since, until = x.since(width), x.until(width)
    d_writes = read(scores, d_y, "tn") + until * exact(x.k, d_after, "nn")
    d_solved = exact(inverse, d_writes, "tn")
    d_target = x.beta(width) * d_solved

    # Those of queries above those of keys: their products have one second operand.
    d_both = _rows(d_y, -d_target)
    d_overlaps = read(d_both, writes, "nt") * _rows(between, _below(between))
    past = _rows(x.since(of_keys), x.since(of_keys)) * read(d_both, start, "nt")
    q_reads, k_reads = jnp.split(read(d_overlaps, x.k, "nn") + past, 2, axis=1)
    carried = x.until(of_keys) * read(writes, d_after, "nt")
    k_writes = read(d_overlaps, _rows(x.q, x.k), "tn") + carried
    decay = pack_decays.decay_at_end(x.total, width) * d_after
    d_start = decay + read(x.q, since * d_y, "tn") - exact(x.k, since * d_target, "tn")

    q, k, size = x.q.astype(F32), x.k.astype(F32), x.q.shape[1]
    return Cotangents(
        (q_reads, k_reads + k_writes, d_target),
        d_start,
        sums=(
            q * q_reads + k * (k_reads - k_writes) + at_end(k * carried, size),
            at_end(decay * start, size),
        ),
        # A small difference, where the memory knows what comes.
        beta=d_solved * (target - exact(later, writes, "nn")),
    )


def _solve(
    x: Chunk, start: Float[Array, "P K VV"], read: Multiply, exact: Multiply
) -> Solved:
    between = pack_decays.decays(x.total).between
    # In one product, whose second operand is loaded once.
    overlaps = read(_rows(x.q, x.k), x.k, "nt")
    of_q, of_k = jnp.split(overlaps, 2, axis=1)
    later = of_k * _below(between)
    inverse = _inverse(x.beta(later.shape[-1]) * later, read, exact, operand_dtype(x.k))
    width = start.shape[-1]
    target = x.v - x.since(width) * exact(x.k, start, "nn")
    writes = exact(inverse, x.beta(width) * target, "nn")
    return Solved(between, of_q * between, later, inverse, target, writes)


def _rows(*parts: Array) -> Array:
    """One above the other."""
    return jnp.concatenate(parts, axis=1)


def _below(x: Float[Array, "P C CC"]) -> Float[Array, "P C CC"]:
    """Zero on the diagonal of each head."""
    return jnp.where(packs.sublane(x.shape) == _other(x), 0.0, x)


def _inverse(
    lower: Float[Array, "P C CC"], read: Multiply, exact: Multiply, dtype: jnp.dtype
) -> Float[Array, "P C CC"]:
    """(I + L)⁻¹ of each head, L below the diagonal, C a power of two.

    The inverse of blocks on the diagonal gives that of blocks twice as large, as in
    `common.triangular`, here of all blocks at once. Beside tokens in bfloat16 it is
    found in bfloat16, and a step of Newton's method, T + T (I - (I + L) T), squares
    what is wrong with it.
    """
    # Its highest bit is the size of the block that is too small for both tokens.
    apart = packs.sublane(lower.shape) ^ _other(lower)
    ones = (apart == 0).astype(F32)
    inverse, size = ones, 1
    while size < lower.shape[1]:
        corner = jnp.where((apart >= size) & (apart < 2 * size), lower, 0.0)
        if size > 1:
            corner = read(read(inverse, corner, "nn"), inverse, "nn")
        inverse, size = inverse - corner, 2 * size
    if dtype == F32:
        return inverse
    coarse = inverse.astype(dtype)
    inverse = coarse.astype(F32)
    wrong = ones - inverse - exact(lower, coarse, "nn")
    return inverse + read(coarse, wrong, "nn")


def _other(x: Float[Array, "P C CC"]):
    """The token of each lane."""
    return packs.within(x.shape, x.shape[1])


def _products(x: Chunk) -> tuple[Multiply, Multiply]:
    """Products for reads in the tokens' dtype, and those for the memory.

    Errors of a write, and of its cotangent, grow through the solution and from chunk to
    chunk: there operands beside tokens in bfloat16 have 16 bits, in two parts.
    """
    heads, dtype = len(x.total.column), operand_dtype(x.q)

    def read(x: Array, y: Array, form: Form):
        x, y = x.astype(dtype), y.astype(dtype)
        if form == "tn":
            return packs.diagonal_blocks(multiply(x, y, form, dtype), heads)
        return multiply(x, packs.block_diagonal(y, heads), form, dtype)

    def parts(x):
        exact = x.dtype == dtype
        return [x] if exact else packs.in_bfloat16(x, 2)

    def exact(x: Array, y: Array, form: Form):
        products = [
            read(part, other, form)
            for i, part in enumerate(parts(x))
            for j, other in enumerate(parts(y))
            # That of both small parts is left out.
            if i + j < 2
        ]
        return functools.reduce(jnp.add, products)

    return read, exact
