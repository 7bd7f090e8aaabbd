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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import packs
from memjax_kernels._src.common.packs.channels import (
    BLOCK,
    Decays,
    all_lanes,
    channel_sums,
    decays,
    pairs,
    suffix_sums,
)
from memjax_kernels._src.common.packs.recurrence_kernels import Channels, Cotangents
from memjax_kernels._src.common.products import operand_dtype
from memjax_kernels._src.linear.packed_delta import (
    inverse_of,
    parts_of,
    products,
    rows,
)

F32 = jnp.float32


class Compared(NamedTuple):
    """Products of a chunk that its writes are solved from.

    Attributes:
        scores: of queries with keys up to their own.
        later: of keys with earlier ones.
        past: the read of the memory before the chunk, (Q since) S.
        known: what that memory has of the keys, (K since) S.
    """

    scores: Float[Array, "P C CC"]
    later: Float[Array, "P C CC"]
    past: Float[Array, "P C VV"]
    known: Float[Array, "P C VV"]


def advance(
    x: Channels, start: Float[Array, "P K VV"]
) -> tuple[Float[Array, "P K VV"], Float[Array, "P C VV"]]:
    """The memory after a chunk, and its reads."""
    read, exact = products(x)
    given = x.q, x.k, x.g, start
    found = _each_pair(functools.partial(_compare, x), *given)
    _, _, writes = _solve(x, found.later, found.known)

    def finish(k, g, start, found, writes):
        left = decays(g)
        written = exact(k * left.until, writes, "tn")
        whole = all_lanes(left.since[:, -1:], x.heads, start.shape[-1])
        y = read(found.scores, writes, "nn") + found.past
        return whole * start + written, y

    return _each_pair(finish, *given[1:], found, writes)


def vjp(
    x: Channels,
    start: Float[Array, "P K VV"],
    d_after: Float[Array, "P K VV"],
    d_y: Float[Array, "P C VV"],
) -> Cotangents:
    """The cotangents of a chunk, which is computed again from its memory."""
    read, exact = products(x)
    given = x.q, x.k, x.g, start, d_after, d_y

    def before(q, k, g, start, d_after, d_y):
        found = _compare(x, q, k, g, start)
        until = decays(g).until
        d_writes = read(found.scores, d_y, "tn") + exact(k * until, d_after, "nn")
        return found, d_writes

    found, d_writes = _each_pair(before, *given)
    inverse, target, writes = _solve(x, found.later, found.known)
    d_solved = exact(inverse, d_writes, "tn")
    d_target = x.beta(start.shape[-1]) * d_solved
    finish = functools.partial(_finish, x, read, exact)
    d_q, d_k, d_g, d_start = _each_pair(finish, *given, writes, d_target)
    return Cotangents(
        (d_q, d_k, d_target, d_g),
        d_start,
        # A small difference, where the memory knows what comes.
        beta=d_solved * (target - exact(found.later, writes, "nn")),
    )


def _each_pair(function: Callable[..., Any], *given: Any) -> Any:
    """The function of two packs after the other: fewer values are there at once."""
    leaves, tree = jax.tree.flatten(given)
    size = 2 - len(leaves[0]) % 2
    pairs_of = zip(*(jnp.split(x, len(x) // size) for x in leaves), strict=True)
    found = [function(*jax.tree.unflatten(tree, pair)) for pair in pairs_of]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)


def _compare(x: Channels, q, k, g, start) -> Compared:
    """The products of a pack that its writes are solved from."""
    read, _ = products(x)
    left, dtype = decays(g), operand_dtype(x.q)
    scores, later = _overlaps(x, q, k, left)
    # Queries above keys: the memory is loaded once.
    large, *small = parts_of(start, dtype)
    keys = parts_of(k * left.since, dtype)
    found = read(rows(q * left.since, *keys), large, "nn")
    past, *known = jnp.split(found, 1 + len(keys), axis=1)
    known += [read(keys[0], part, "nn") for part in small]
    return Compared(scores, later, past, functools.reduce(jnp.add, known))


def _solve(x: Channels, later: Array, known: Array) -> tuple[Array, Array, Array]:
    """The inverse, V less what is known, and the writes."""
    _, exact = products(x)
    lower = x.beta(later.shape[-1]) * later
    inverse, target = inverse_of(lower, x.heads, operand_dtype(x.q)), x.v - known
    return inverse, target, exact(inverse, x.beta(target.shape[-1]) * target, "nn")


def _finish(x, read, exact, q, k, g, start, d_after, d_y, writes, d_target):
    """Cotangents of queries, keys, gates and the memory before the chunk."""
    left, (q, k) = decays(g), (y.astype(F32) for y in (q, k))
    # Cotangents of queries above those of keys: both are multiplied by one matrix.
    d_both = rows(d_y, -d_target)
    d_overlaps = read(d_both, writes, "nt")
    past = rows(left.since, left.since) * read(d_both, start, "nt")
    q_reads, k_reads = jnp.split(past, 2, axis=1)
    k_writes = carried = left.until * read(writes, d_after, "nt")
    sums = q * q_reads + k * (k_reads - carried)
    d_own = _sum_lanes(d_y * writes, x.heads, k.shape[-1])
    q_reads, k_writes = q_reads + d_own * k, k_writes + d_own * q
    d_scores, d_later = jnp.split(d_overlaps, 2, axis=1)
    for half, chosen, f in _levels(d_scores, left):
        late = functools.partial(_late, half)
        d_pairs = rows(
            *(jnp.where(late(chosen), late(d), 0.0) for d in (d_scores, d_later))
        )
        keys = x.cast(k * f)
        both = rows(x.cast(late(q * f)), late(keys))
        reads = read(d_pairs, keys, "nn")
        written = read(d_pairs, both, "tn")
        of_queries, of_keys = jnp.split(rows(late(f), late(f)) * reads, 2, axis=1)
        q_reads = _add_late(half, q_reads, of_queries)
        k_reads = _add_late(half, k_reads, of_keys)
        k_writes += f * written
        # Of the rounded operands: what a pair adds here cancels for all gates but those
        # between its tokens.
        of_queries, of_keys = jnp.split(both * reads, 2, axis=1)
        sums = _add_late(half, sums - keys * written, of_queries + of_keys)
    decay = all_lanes(left.since[:, -1:], x.heads, start.shape[-1]) * d_after
    d_start = decay + read(q * left.since, d_y, "tn")
    d_start -= exact(k * left.since, d_target, "tn")
    # All that the memory after the chunk receives, at every token.
    end = packs.sum_slots(k * carried) + channel_sums(decay * start, x.heads)
    return q_reads, k_reads + k_writes, suffix_sums(sums) + end, d_start


def _overlaps(
    x: Channels, q: Array, k: Array, left: Decays
) -> tuple[Float[Array, "P C CC"], Float[Array, "P C CC"]]:
    """Scores of queries, and those of keys with earlier keys."""
    (read, _), size, heads = products(x), q.shape[1], x.heads
    # Large parts of keys with both parts of others, whose columns are neighbours.
    number = len(parts_of(k * left.since, operand_dtype(q)))
    scores = found = jnp.zeros((len(q), size, heads * number * size))
    apart = packs.sublane(found.shape) ^ packs.within(found.shape, size)
    for level, f in enumerate(left.blocks[1:]):
        half = 1 << level
        keys, queries = parts_of(k * f, operand_dtype(q)), _late(half, q * f)
        both = read(rows(queries, keys[0]), rows(*keys), "nt")
        late = queries.shape[1]
        # Entries outside of this level's blocks are overwritten at larger levels.
        scores = _put_late(half, scores, both[:, :late], apart >= half)
        found = jnp.where(apart >= half, both[:, late:], found)
    scores, later = (_columns(y, heads, number, 0) for y in (scores, found))
    if number > 1:
        # Small parts of later tokens with large ones are in the place of the transpose.
        mixed = _columns(found, heads, number, 1)
        later += mixed + _transpose(mixed, heads)
    own = _sum_lanes(q.astype(F32) * k, heads, heads * size)
    row, other = packs.sublane(later.shape), packs.within(later.shape, size)
    scores = jnp.where(row == other, own, jnp.where(row > other, scores, 0.0))
    return scores, jnp.where(row > other, later, 0.0)


def _columns(x: Array, heads: int, number: int, index: int) -> Array:
    """Columns of part `index` of `number`, of each head."""
    parts = jnp.split(x, heads * number, axis=2)
    return jnp.concatenate(parts[index::number], axis=2)


def _levels(scores: Float[Array, "P C CC"], left: Decays):
    """Halves of the blocks of 2, 4 ... C tokens, their pairs and decays."""
    found = zip(pairs(scores), left.blocks, strict=True)
    return [(1 << i >> 1, chosen, f) for i, (chosen, f) in enumerate(found)][1:]


def _late(half: int, x: Array) -> Array:
    """The rows of late halves, where they fill registers; else all."""
    if half < BLOCK:
        return x
    return rows(*jnp.split(x, x.shape[1] // half, axis=1)[1::2])


def _put_late(half: int, x: Array, found: Array, chosen: Array) -> Array:
    """x with what was found for late halves in the place of the chosen."""
    if half < BLOCK:
        return jnp.where(chosen, found, x)
    parts, masks = (jnp.split(y, x.shape[1] // half, axis=1) for y in (x, chosen))
    news = jnp.split(found, len(parts) // 2, axis=1)
    both = zip(masks[1::2], news, parts[1::2], strict=True)
    parts[1::2] = [jnp.where(*given) for given in both]
    return rows(*parts)


def _add_late(half: int, x: Array, found: Array) -> Array:
    """x and what was found for late halves."""
    if half < BLOCK:
        return x + found
    parts = jnp.split(x, x.shape[1] // half, axis=1)
    news = jnp.split(found, len(parts) // 2, axis=1)
    parts[1::2] = [x + y for x, y in zip(parts[1::2], news, strict=True)]
    return rows(*parts)


def _sum_lanes(x: Float[Array, "P C DD"], heads: int, width: int) -> Array:
    """Sums over each head's lanes, in `width` lanes of all heads."""
    return packs.widen(packs.sums(x, heads), width)


def _transpose(x: Float[Array, "P C CC"], heads: int) -> Float[Array, "P C CC"]:
    """Of each head."""
    by_head = jnp.split(jnp.swapaxes(x, 1, 2), heads, axis=1)
    return jnp.concatenate(by_head, axis=2)
