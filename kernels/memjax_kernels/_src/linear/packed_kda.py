"""One chunk of the delta rule with decays of channels for packed heads; its gradient.

`packed_delta` has the equations and the products, for decays of heads. Here decays are
in the operands: with f those of a block's halves (`packs.channels`), and M the pairs of
tokens of which it is the smallest common block, the later one in the late half,

    scores = sum over blocks of M ((Q f) (K f)^T), and Q K^T on the diagonal
    later  = sum over blocks of M ((K f) (K f)^T)

    E = V - (K since) S - later U           the prediction errors
    U = beta E                              so (I + beta later) U = beta (V - ...)
    Y = scores U + (Q since) S              S' = last S + (K until)^T U

The gradient of a gate's sum at token i and a channel is the reads of q_i and k_i there
less the write of k_i there.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import packs
from memjax_kernels._src.common.packs.channels import (
    Decays,
    all_lanes,
    channel_sums,
    decays,
    pairs,
    suffix_sums,
)
from memjax_kernels._src.common.packs.recurrence_kernels import Channels, Cotangents
from memjax_kernels._src.common.products import Multiply, operand_dtype
from memjax_kernels._src.linear.packed_delta import (
    inverse_of,
    parts_of,
    products,
    rows,
)

F32 = jnp.float32


def advance(
    x: Channels, start: Float[Array, "P K VV"]
) -> tuple[Float[Array, "P K VV"], Float[Array, "P C VV"]]:
    """The memory after a chunk, and its reads."""
    read, exact = products(x)
    left, width = decays(x.g), start.shape[-1]
    scores, later = _overlaps(x, left, read)
    # Queries above keys: the memory is loaded once.
    large, *small = parts_of(start, operand_dtype(x.q))
    keys = parts_of(x.k * left.since, operand_dtype(x.q))
    found = read(rows(x.q * left.since, *keys), large, "nn")
    past, *known = jnp.split(found, 1 + len(keys), axis=1)
    known += [read(keys[0], part, "nn") for part in small]
    target = x.v - functools.reduce(jnp.add, known)
    inverse = inverse_of(x.beta(later.shape[-1]) * later, read, operand_dtype(x.q))
    writes = exact(inverse, x.beta(width) * target, "nn")
    y = read(scores, writes, "nn") + past
    written = exact(x.k * left.until, writes, "tn")
    return all_lanes(left.since[:, -1:], x.heads, width) * start + written, y


def vjp(
    x: Channels,
    start: Float[Array, "P K VV"],
    d_after: Float[Array, "P K VV"],
    d_y: Float[Array, "P C VV"],
) -> Cotangents:
    """The cotangents of a chunk, which is computed again from its memory."""
    read, exact = products(x)
    left, width = decays(x.g), start.shape[-1]
    scores, later = _overlaps(x, left, read)
    q, k = x.q.astype(F32), x.k.astype(F32)
    of_q, of_k = q * left.since, k * left.since
    target = x.v - exact(of_k, start, "nn")
    inverse = inverse_of(x.beta(later.shape[-1]) * later, read, operand_dtype(x.q))
    writes = exact(inverse, x.beta(width) * target, "nn")

    d_writes = read(scores, d_y, "tn") + exact(k * left.until, d_after, "nn")
    d_solved = exact(inverse, d_writes, "tn")
    d_target = x.beta(width) * d_solved
    # Those of queries above those of keys: their products have one second operand.
    d_both = rows(d_y, -d_target)
    d_overlaps = read(d_both, writes, "nt")
    past = rows(left.since, left.since) * read(d_both, start, "nt")
    q_reads, k_reads = jnp.split(past, 2, axis=1)
    k_writes = carried = left.until * read(writes, d_after, "nt")
    sums = q * q_reads + k * (k_reads - carried)
    d_own = _sum_lanes(d_y * writes, x.heads, k.shape[-1])
    q_reads, k_writes = q_reads + d_own * k, k_writes + d_own * q
    for chosen, f in _levels(d_overlaps[:, : q.shape[1]], left):
        d_pairs = jnp.where(rows(chosen, chosen), d_overlaps, 0.0)
        both = x.cast(rows(q * f, k * f))
        reads = read(d_pairs, both[:, q.shape[1] :], "nn")
        found = read(d_pairs, both, "tn")
        of_queries, of_keys = jnp.split(reads, 2, axis=1)
        q_reads += f * of_queries
        k_reads += f * of_keys
        k_writes += f * found
        # Of the rounded operands: what a pair adds here cancels for all gates but those
        # between its tokens.
        of_queries, of_keys = jnp.split(both * reads, 2, axis=1)
        sums += of_queries + of_keys - both[:, q.shape[1] :] * found
    decay = all_lanes(left.since[:, -1:], x.heads, width) * d_after
    d_start = decay + read(of_q, d_y, "tn") - exact(of_k, d_target, "tn")
    # All that the memory after the chunk receives, at every token.
    end = packs.sum_slots(k * carried) + channel_sums(decay * start, x.heads)
    return Cotangents(
        (q_reads, k_reads + k_writes, d_target, suffix_sums(sums) + end),
        d_start,
        beta=d_solved * (target - exact(later, writes, "nn")),
    )


def _overlaps(
    x: Channels, left: Decays, read: Multiply
) -> tuple[Float[Array, "P C CC"], Float[Array, "P C CC"]]:
    """Scores of queries, and those of keys with earlier keys."""
    size, heads = x.q.shape[1], x.heads
    scores = later = cross = jnp.zeros((len(x.q), size, heads * size))
    apart = packs.sublane(scores.shape) ^ packs.within(scores.shape, size)
    rest = []
    for level, (chosen, f) in enumerate(_levels(scores, left)):
        keys = parts_of(x.k * f, operand_dtype(x.q))
        found = read(rows(x.q * f, *keys), keys[0], "nt")
        of_q, of_k, *rest = jnp.split(found, 1 + len(keys), axis=1)
        scores = jnp.where(chosen, of_q, scores)
        later = jnp.where(chosen, of_k, later)
        if rest:
            cross = jnp.where(apart >> level == 1, rest[0], cross)
    if rest:
        # Of the product of two sums of parts: large with large, and both mixed ones.
        mixed = cross + _transpose(cross, heads)
        after = packs.sublane(cross.shape) > packs.within(cross.shape, size)
        later += jnp.where(after, mixed, 0.0)
    own = _sum_lanes(x.q.astype(F32) * x.k, heads, heads * size)
    return jnp.where(apart == 0, own, scores), later


def _levels(scores: Float[Array, "P C CC"], left: Decays):
    """Pairs of tokens of the blocks of 2, 4 ... C, and the decays of their halves."""
    return list(zip(pairs(scores), left.blocks, strict=True))[1:]


def _sum_lanes(x: Float[Array, "P C DD"], heads: int, width: int) -> Array:
    """Sums over each head's lanes, in `width` lanes of all heads."""
    return packs.widen(packs.sums(x, heads), width)


def _transpose(x: Float[Array, "P C CC"], heads: int) -> Float[Array, "P C CC"]:
    """Of each head."""
    by_head = jnp.split(jnp.swapaxes(x, 1, 2), heads, axis=1)
    return jnp.concatenate(by_head, axis=2)
