"""One chunk of S ← diag(exp(g)) S + k vᵀ, y = Sᵀq for packed heads, and its gradient.

With f the decays of a block's halves (`packs.channels`), and M the pairs of tokens of
which it is the smallest common block, the reading one in the late half:

    y = P D(v) + (q since) D(S)         P = sum over blocks of M ((q f) D(k f)^T)
    S' = last S + (k until)^T v

The gradient of a gate's sum at token i and a channel is the read of q_i there less the
write of k_i there.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import packs
from memjax_kernels._src.common.packs import block_diagonal, diagonal_blocks
from memjax_kernels._src.common.packs.channels import (
    all_lanes,
    decays,
    pairs,
    suffix_sums,
)
from memjax_kernels._src.common.packs.chunk_kernels import Cotangents
from memjax_kernels._src.common.packs.recurrence_chunk import Channels, Gates

BF16 = jnp.dtype(jnp.bfloat16)


def advance(
    x: Channels, start: Float[Array, "P K VV"]
) -> tuple[Float[Array, "P K VV"], Float[Array, "P C VV"]]:
    """The memory after a chunk, and its reads."""
    heads, cast, dot = x.heads, x.cast, x.dot
    blocks, since, until = decays(x.g)
    y = dot(cast(_scores(x, blocks)), block_diagonal(x.v, heads), "nn")
    y += dot(cast(x.q * since), block_diagonal(cast(start), heads), "nn")
    written = diagonal_blocks(dot(cast(x.k * until), x.v, "tn"), heads)
    return all_lanes(since[:, -1:], heads, start.shape[-1]) * start + written, y


def vjp(
    x: Channels,
    start: Float[Array, "P K VV"],
    d_after: Float[Array, "P K VV"],
    d_y: Float[Array, "P C VV"],
) -> Cotangents:
    """The cotangents of a chunk, which is computed again from its memory."""
    heads, cast, dot = x.heads, x.cast, x.dot
    blocks, since, until = decays(x.g)
    d_y, d_memory = cast(d_y), block_diagonal(cast(d_after), heads)
    d_scores = dot(d_y, block_diagonal(x.v, heads), "nt")
    d_q = since * dot(d_y, block_diagonal(cast(start), heads), "nt")
    d_written = until * dot(x.v, d_memory, "nt")
    d_k = d_written
    sums = x.q * d_q - x.k * d_k
    for chosen, f in zip(pairs(d_scores), blocks, strict=True):
        d_pairs, q, k = (
            cast(jnp.where(chosen, d_scores, 0.0)),
            cast(x.q * f),
            cast(x.k * f),
        )
        reads = dot(d_pairs, block_diagonal(k, heads), "nn")
        writes = diagonal_blocks(dot(d_pairs, q, "tn"), heads)
        d_q, d_k = d_q + f * reads, d_k + f * writes
        # Of the rounded operands: what a pair adds here cancels for all gates but those
        # between its tokens.
        sums += q * reads - k * writes
    d_v = diagonal_blocks(dot(cast(_scores(x, blocks)), d_y, "tn"), heads)
    d_v += dot(cast(x.k * until), d_memory, "nn")
    decay = all_lanes(since[:, -1:], heads, start.shape[-1]) * d_after
    d_start = decay + diagonal_blocks(dot(cast(x.q * since), d_y, "tn"), heads)

    # All that the memory after the chunk receives, at every token.
    ones = jnp.ones_like(d_y, BF16)
    end = packs.in_parts(
        lambda part: dot(ones, block_diagonal(part, heads), "nt"), decay * start
    )
    d_g = suffix_sums(sums) + packs.sum_slots(x.k * d_written) + end
    return Cotangents((d_q, d_k, d_v, d_g), Gates(), d_start)


def _scores(
    x: Channels, blocks: list[Float[Array, "P C KK"]]
) -> Float[Array, "P C CC"]:
    cast, dot = x.cast, x.dot
    scores = jnp.zeros((*x.q.shape[:2], x.heads * x.q.shape[1]))
    for chosen, f in zip(pairs(scores), blocks, strict=True):
        product = dot(cast(x.q * f), block_diagonal(cast(x.k * f), x.heads), "nt")
        scores = jnp.where(chosen, product, scores)
    return scores
