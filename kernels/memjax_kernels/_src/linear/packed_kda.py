"""One chunk of the delta rule with decays of channels for packed heads; its gradient.

`packed_delta` has the equations and the products, for decays of heads. Here decays are
in the operands: with f those of a block's halves (`packs.channels`), and M the pairs of
tokens of which it is the smallest common block, the later one in the late half,

    scores = sum over blocks of M ((Q f) (K f)^T), and Q K^T on the diagonal
    later  = sum over blocks of M ((K f) (K f)^T)

    E = V - (K since) S - later U           the prediction errors
    U = beta E                              so (I + beta later) U = beta (V - ...)
    Y = scores U + (Q since) S              S' = last S + (K until)^T U

Where a chunk in bfloat16 forgets little, f are decays from the middle of a half and
their inverses, and M are all pairs that are read in that half: two products for all.

Gated DeltaNet-2 has rates of channels instead of beta: with R = erase K the keys that
the errors are of, later is of R with K, and U = write V - (R since) S - later U.

The gradient of a gate's sum at token i and a channel is the reads of q_i and k_i there
less the write of k_i there.
"""

import functools
import math
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
from memjax_kernels._src.common.packs.chunk_kernels import Cotangents
from memjax_kernels._src.common.packs.recurrence_chunk import Channels, Gates
from memjax_kernels._src.common.products import operand_dtype
from memjax_kernels._src.linear.packed_delta import inverse_of, parts_of, products, rows

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
    given = x.q, x.k, _erased(x), x.g, start
    found = _in_turn(2, functools.partial(_compare, x), *given)
    _, _, writes = _solve(x, found.later, found.known)

    def finish(k, g, start, found, writes):
        left = decays(g, x.mild)
        written = exact(k * left.until, writes, "tn")
        whole = all_lanes(left.since[:, -1:], x.heads, start.shape[-1])
        y = read(found.scores, writes, "nn") + found.past
        return whole * start + written, y

    return _in_turn(2, finish, x.k, x.g, start, found, writes)


def vjp(
    x: Channels,
    start: Float[Array, "P K VV"],
    d_after: Float[Array, "P K VV"],
    d_y: Float[Array, "P C VV"],
) -> Cotangents:
    """The cotangents of a chunk, which is computed again from its memory."""
    read, exact = products(x)
    given = x.q, x.k, _erased(x), x.g, start, d_after, d_y
    # By counted cycles.
    packs_at_once = 4 if x.mild else 2

    def before(q, k, erased, g, start, d_after, d_y):
        found = _compare(x, q, k, erased, g, start)
        until = decays(g, x.mild).until
        d_writes = read(found.scores, d_y, "tn") + exact(k * until, d_after, "nn")
        return found, d_writes

    found, d_writes = _in_turn(packs_at_once, before, *given)
    inverse, target, writes = _solve(x, found.later, found.known)
    d_solved = exact(inverse, d_writes, "tn")
    d_target = _rated(x, d_solved)
    finish, given = functools.partial(_finish, x, read, exact), (*given, writes)
    d_q, d_erased, d_k, d_g, d_start = _in_turn(packs_at_once, finish, *given, d_target)
    if x.rates:
        erase, write = (rate.astype(F32) for rate in x.rates)
        d_rates = d_erased * x.k.astype(F32), d_target * x.v.astype(F32)
        d_tokens = d_q, d_k + erase * d_erased, write * d_target, d_g
        return Cotangents((*d_tokens, *d_rates), Gates(), d_start)
    # A small difference, where the memory knows what comes.
    d_beta = d_solved * (target - exact(found.later, writes, "nn"))
    d_tokens = d_q, d_erased + d_k, d_target, d_g
    return Cotangents(d_tokens, Gates(beta=d_beta), d_start)


def _erased(x: Channels) -> Float[Array, "P C KK"] | None:
    """R; None where it is K."""
    return x.rates[0].astype(F32) * x.k.astype(F32) if x.rates else None


def _rated(x: Channels, y: Float[Array, "P C DD"]) -> Float[Array, "P C DD"]:
    return y if x.rates else x.beta(y.shape[-1]) * y


def _in_turn(number: int, function: Callable[..., Any], *given: Any) -> Any:
    """The function of at most `number` packs at a time: fewer values are live."""
    leaves, tree = jax.tree.flatten(given)
    turns = len(leaves[0]) // math.gcd(len(leaves[0]), number)
    of_turns = zip(*(jnp.split(x, turns) for x in leaves), strict=True)
    found = [function(*jax.tree.unflatten(tree, some)) for some in of_turns]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)


def _compare(x: Channels, q, k, erased, g, start) -> Compared:
    """The products of a pack that its writes are solved from."""
    read, _ = products(x)
    left, dtype = decays(g, x.mild), operand_dtype(x.q)
    scores, later = _overlaps(x, q, k, erased, left)
    # Queries above keys: the memory is loaded once.
    large, *small = parts_of(start, dtype)
    keys = parts_of((k if erased is None else erased) * left.since, dtype)
    found = read(rows(q * left.since, *keys), large, "nn")
    past, *known = jnp.split(found, 1 + len(keys), axis=1)
    known += [read(keys[0], part, "nn") for part in small]
    return Compared(scores, later, past, functools.reduce(jnp.add, known))


def _solve(x: Channels, later: Array, known: Array) -> tuple[Array, Array, Array]:
    """The inverse, V less what is known, and the writes."""
    _, exact = products(x)
    inverse = inverse_of(_rated(x, later), x.heads, operand_dtype(x.q))
    target = (x.rates[1].astype(F32) * x.v.astype(F32) if x.rates else x.v) - known
    return inverse, target, exact(inverse, _rated(x, target), "nn")


def _finish(x, read, exact, q, k, erased, g, start, d_after, d_y, writes, d_target):
    """Cotangents of queries, R, K, gates and the memory before the chunk."""
    left, (q, k) = decays(g, x.mild), (y.astype(F32) for y in (q, k))
    r = k if erased is None else erased
    # Cotangents of queries above those of keys: both are multiplied by one matrix.
    d_both = rows(d_y, -d_target)
    d_overlaps = read(d_both, writes, "nt")
    past = rows(left.since, left.since) * read(d_both, start, "nt")
    q_reads, k_reads = jnp.split(past, 2, axis=1)
    k_writes = carried = left.until * read(writes, d_after, "nt")
    sums = q * q_reads + (r * k_reads - k * carried)
    d_own = packs.sum_heads(d_y * writes, x.heads, k.shape[-1])
    q_reads, k_writes = q_reads + d_own * k, k_writes + d_own * q
    d_scores, d_later = jnp.split(d_overlaps, 2, axis=1)
    for half, chosen, f, back in _levels(x, d_scores, left):
        late, number = functools.partial(_late, half), back.shape[1]
        d_pairs = (jnp.where(late(chosen), late(d), 0.0) for d in (d_scores, d_later))
        d_pairs = _columns(rows(*d_pairs), x.heads, x.q.shape[1] // number, 0)
        keys = x.cast(k[:, :number] * back)
        erasing = keys if r is k and f is back else x.cast(r * f)
        both = rows(x.cast(late(q * f)), late(erasing))
        reads = read(d_pairs, keys, "nn")
        written = read(d_pairs, both, "tn")
        of_queries, of_keys = jnp.split(rows(late(f), late(f)) * reads, 2, axis=1)
        q_reads = _add_late(half, q_reads, of_queries)
        k_reads = _add_late(half, k_reads, of_keys)
        k_writes = _add_first(k_writes, back * written)
        # Of the rounded operands: what a pair adds here cancels for all gates but those
        # between its tokens.
        of_queries, of_keys = jnp.split(both * reads, 2, axis=1)
        sums = _add_first(sums, -keys * written)
        sums = _add_late(half, sums, of_queries + of_keys)
    decay = all_lanes(left.since[:, -1:], x.heads, start.shape[-1]) * d_after
    d_start = decay + read(q * left.since, d_y, "tn")
    d_start -= exact(r * left.since, d_target, "tn")
    # All that the memory after the chunk receives, at every token.
    end = packs.sum_slots(k * carried) + channel_sums(decay * start, x.heads)
    return q_reads, k_reads, k_writes, suffix_sums(sums) + end, d_start


def _overlaps(
    x: Channels, q: Array, k: Array, erased: Array | None, left: Decays
) -> tuple[Float[Array, "P C CC"], Float[Array, "P C CC"]]:
    """Scores of queries, and those of R with earlier keys."""
    if x.mild:
        scores, later = _mild_overlaps(x, q, k, erased, left)
        own = scores
    else:
        scores, later = _levels_overlaps(x, q, k, erased, left)
        own = packs.sum_heads(q.astype(F32) * k, x.heads, scores.shape[-1])
    row, other = packs.sublane(later.shape), packs.within(later.shape, q.shape[1])
    scores = jnp.where(row == other, own, jnp.where(row > other, scores, 0.0))
    return scores, jnp.where(row > other, later, 0.0)


def _mild_overlaps(x, q, k, erased, left):
    """All pairs of each half's rows in one product.

    Those of later keys are to be masked: they may be NaN.
    """
    (read, _), dtype = products(x), operand_dtype(q)
    reads, writes, across = left.blocks
    half = across.shape[1]
    # Keys that are rounded as well as queries would cost digits of near pairs.
    keys = parts_of(k * writes, dtype)
    early = parts_of(k[:, :half] * across, dtype)
    of_late = [rows(y, _late(half, z)) for y, z in zip(early, keys, strict=True)]
    others = parts_of((k if erased is None else erased) * reads, dtype)
    halves = [jnp.split(y, 2, axis=1) for y in (q * reads, *others)]
    found = []
    for of_half, known in zip(zip(*halves, strict=True), (keys, of_late), strict=True):
        both = jnp.split(read(rows(*of_half), rows(*known), "nt"), 3, axis=1)
        (scores, more), (later, mixed), (small, _) = (
            [_columns(y, x.heads, 2, part) for part in (0, 1)] for y in both
        )
        found.append((scores + more, later + mixed + small))
    scores, later = (rows(*pair) for pair in zip(*found, strict=True))
    return scores, later


def _levels_overlaps(x, q, k, erased, left):
    """Products of the halves of each size of blocks."""
    (read, _), size, heads = products(x), q.shape[1], x.heads
    dtype = operand_dtype(q)
    # Large parts of keys with both parts of others, whose columns are neighbours.
    number = len(parts_of(k * left.since, dtype))
    scores = jnp.zeros((len(q), size, heads * number * size))
    found = [scores] * (1 if erased is None else number)
    apart = packs.sublane(scores.shape) ^ packs.within(scores.shape, size)
    for level, f in enumerate(left.blocks[1:]):
        half = 1 << level
        keys, queries = parts_of(k * f, dtype), _late(half, q * f)
        others = keys[:1]
        if erased is not None:
            others = parts_of(_late(half, erased * f), dtype)
        both = read(rows(queries, *others), rows(*keys), "nt")
        late = queries.shape[1]
        # Entries outside of this level's blocks are overwritten at larger levels.
        scores = _put_late(half, scores, both[:, :late], apart >= half)
        overlaps = jnp.split(both[:, late:], len(others), axis=1)
        if erased is None:
            found = [jnp.where(apart >= half, overlaps[0], found[0])]
            continue
        pairs_of = zip(found, overlaps, strict=True)
        found = [_put_late(half, *pair, apart >= half) for pair in pairs_of]
    scores, later = (_columns(y, heads, number, 0) for y in (scores, found[0]))
    if number > 1:
        mixed = _columns(found[0], heads, number, 1)
        # Small parts of later tokens with large ones; of keys in the transpose's place.
        small = packs.turned(mixed, heads)
        if erased is not None:
            small = _columns(found[1], heads, number, 0)
        later += mixed + small
    return scores, later


def _columns(x: Array, heads: int, number: int, index: int) -> Array:
    """Columns of part `index` of `number`, of each head."""
    if number == 1:
        return x
    parts = jnp.split(x, heads * number, axis=2)
    return jnp.concatenate(parts[index::number], axis=2)


def _levels(x: Channels, scores: Float[Array, "P C CC"], left: Decays):
    """Halves of blocks, their pairs, decays of reads, and those of writes there."""
    if x.mild:
        shape = scores.shape
        later = packs.sublane(shape) > packs.within(shape, shape[1])
        reads, writes, across = left.blocks
        half = across.shape[1]
        of_late = rows(across, _late(half, writes))
        # Rows of the late half with all keys, and of the early one with its own.
        return [(half, later, reads, of_late), (-half, later, reads, writes[:, :half])]
    found = zip(pairs(scores), left.blocks, strict=True)
    return [(1 << i >> 1, chosen, f, f) for i, (chosen, f) in enumerate(found)][1:]


def _late(half: int, x: Array) -> Array:
    """The rows of late halves, of early ones for -half, if they fill registers."""
    if abs(half) < BLOCK:
        return x
    return rows(*jnp.split(x, x.shape[1] // abs(half), axis=1)[half > 0 :: 2])


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
    """x and what was found for the rows of `_late`."""
    if abs(half) < BLOCK:
        return x + found
    parts = jnp.split(x, x.shape[1] // abs(half), axis=1)
    news, some = jnp.split(found, len(parts) // 2, axis=1), slice(half > 0, None, 2)
    parts[some] = [x + y for x, y in zip(parts[some], news, strict=True)]
    return rows(*parts)


def _add_first(x: Array, found: Array) -> Array:
    """x and what was found for its first rows."""
    number = found.shape[1]
    if number == x.shape[1]:
        return x + found
    return rows(x[:, :number] + found, x[:, number:])
