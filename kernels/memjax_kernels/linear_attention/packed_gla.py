"""One chunk of S ← diag(exp(g)) S + k vᵀ, y = Sᵀq for packs of heads, and its gradient.

`common.decays` says why decays between tokens are products over the halves of blocks of
2, 4, 8 ... tokens: no two sums of gates are subtracted. Here the sums of all blocks are
one product of the gates with zeros and ones. With f those of a block's late half up to
a token, or of its early half after a token, and M the pairs of tokens whose smallest
common block it is, with i in the late half:

    y = P D(v) + (q since) D(S)         P = sum over blocks of M ((q f) D(k f)^T)
    S' = last S + (k until)^T v

What a gate's sum at token i receives in a channel is what q_i reads there less what k_i
writes there.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels.common import packs
from memjax_kernels.common.packs import diagonal, own
from memjax_kernels.common.packs.recurrence_kernels import Channels, Cotangents
from memjax_kernels.common.products import multiply, operand_dtype

F32 = jnp.float32
BF16 = jnp.dtype(jnp.bfloat16)


def advance(
    x: Channels, start: Float[Array, "P K VV"]
) -> tuple[Float[Array, "P K VV"], Float[Array, "P C VV"]]:
    """The memory after a chunk, and its reads."""
    heads, low, dot = x.heads, _low(x), _dot(x)
    *blocks, since, until = _decays(x)
    y = dot(low(_scores(x, blocks)), diagonal(x.v, heads), "nn")
    y += dot(low(x.q * since), diagonal(low(start), heads), "nn")
    written = own(dot(low(x.k * until), x.v, "tn"), heads)
    return _kept(x, start) * start + written, y


def pull_back(
    x: Channels,
    start: Float[Array, "P K VV"],
    d_after: Float[Array, "P K VV"],
    d_y: Float[Array, "P C VV"],
) -> Cotangents:
    """The cotangents of a chunk, which is computed again from its memory."""
    heads, low, dot = x.heads, _low(x), _dot(x)
    *blocks, since, until = _decays(x)
    d_y, d_memory = low(d_y), diagonal(low(d_after), heads)
    d_scores = dot(d_y, diagonal(x.v, heads), "nt")
    d_q = since * dot(d_y, diagonal(low(start), heads), "nt")
    d_written = until * dot(x.v, d_memory, "nt")
    d_k = d_written
    sums = x.q * d_q - x.k * d_k
    for pairs, f in zip(_pairs(d_scores), blocks, strict=True):
        d_pairs, q, k = low(jnp.where(pairs, d_scores, 0.0)), low(x.q * f), low(x.k * f)
        reads = dot(d_pairs, diagonal(k, heads), "nn")
        writes = own(dot(d_pairs, q, "tn"), heads)
        d_q, d_k = d_q + f * reads, d_k + f * writes
        # Of the rounded operands: what a pair adds here cancels for all gates but those
        # between its tokens.
        sums += q * reads - k * writes
    d_v = own(dot(low(_scores(x, blocks)), d_y, "tn"), heads)
    d_v += dot(low(x.k * until), d_memory, "nn")
    kept = _kept(x, start) * d_after
    d_start = kept + own(dot(low(x.q * since), d_y, "tn"), heads)

    # All that the memory after the chunk receives, at every token.
    ones = jnp.ones_like(d_y, jnp.bfloat16)
    end = _exact(kept * start, lambda part: dot(ones, diagonal(part, heads), "nt"))
    d_g = _suffix_sums(sums) + packs.sum_slots(x.k * d_written) + end
    return Cotangents((d_q, d_k, d_v, d_g), d_start)


def _scores(
    x: Channels, blocks: list[Float[Array, "P C KK"]]
) -> Float[Array, "P C CC"]:
    low, dot, scores = _low(x), _dot(x), 0.0
    shape = (*x.q.shape[:2], x.heads * x.q.shape[1])
    for pairs, f in zip(_pairs(jnp.zeros(shape)), blocks, strict=True):
        product = dot(low(x.q * f), diagonal(low(x.k * f), x.heads), "nt")
        scores = jnp.where(pairs, product, scores)
    return scores


def _pairs(scores: Float[Array, "P C CC"]) -> list[Bool[Array, "P C CC"]]:
    """Tokens of reads (sublanes) and of writes, by their smallest block: 1, 2, 4 ... C.

    A block of one token has the pair of it with itself.
    """
    size = scores.shape[1]
    i, j = packs.sublane(scores.shape), packs.within(scores.shape, size)
    apart, later = i ^ j, i > j
    halves = [1 << level for level in range(size.bit_length() - 1)]
    of = [later & (apart >= half) & (apart < 2 * half) for half in halves]
    return [apart == 0, *of]


def _decays(x: Channels) -> list[Float[Array, "P C KK"]]:
    """f of blocks of 1, 2, 4 ... C tokens, then since and until."""
    size = x.g.shape[1]
    halves = [1 << level for level in range(size.bit_length() - 1)]
    i, t = (axis((size, size)) for axis in (packs.sublane, packs.lane))
    late = lambda half: (i & half) > 0
    # Up to the token in a late half, behind it in an early one.
    chosen = [
        ((i ^ t) < half) & (((t <= i) & late(half)) | ((t > i) & ~late(half)))
        for half in halves
    ]
    numbers = [mask.astype(F32) for mask in (*chosen, t <= i, t > i)]
    chosen = jnp.concatenate(numbers).astype(BF16)
    wide = jnp.concatenate([*x.g], axis=-1)
    sums = _exact(wide, lambda part: multiply(chosen, part, "nn", BF16))
    width = x.g.shape[-1]
    by_pack = jnp.stack(
        [sums[:, p * width : (p + 1) * width] for p in range(x.g.shape[0])]
    )
    return [jnp.ones_like(x.g), *jnp.split(jnp.exp(by_pack), len(halves) + 2, axis=1)]


def _kept(x: Channels, start: Float[Array, "P K VV"]) -> Float[Array, "P K VV"]:
    """The decays over the whole chunk, in all lanes of a head."""
    ones = jnp.ones((*x.g.shape[:2], start.shape[-1]), jnp.bfloat16)
    sums = _exact(x.g, lambda part: multiply(part, ones, "tn", BF16))
    return jnp.exp(own(sums, x.heads))


def _suffix_sums(x: Float[Array, "P C KK"]) -> Float[Array, "P C KK"]:
    """Sums over each token and those after it."""
    shape = (x.shape[0], x.shape[1], x.shape[1])
    after = (packs.lane(shape) >= packs.sublane(shape)).astype(jnp.bfloat16)
    return _exact(x, lambda part: multiply(after, part, "nn", BF16))


def _exact(x: Float[Array, "..."], product) -> Float[Array, "..."]:
    """A product of x with zeros and ones, in three parts."""
    return functools.reduce(jnp.add, map(product, packs.in_bfloat16(x)))


def _low(x: Channels):
    return lambda y: y.astype(x.q.dtype)


def _dot(x: Channels):
    return functools.partial(multiply, dtype=operand_dtype(x.q))
