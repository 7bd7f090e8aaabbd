"""One chunk of the slots' keys, K̃ ← diag(exp(g)) K̃ + α kᵀ, and the reads softmax(K̃ q).

Gates are of slots, which are the channels that are read. For packs of heads
(`common.packs`), with the memory S = K̃ᵀ, f the decays of a block's halves
(`packs.channels`), and M the pairs of tokens of which it is the smallest common block:

    c = sum over blocks of f ((M (q D(k)^T)) D(α f)) + since (q D(S))
    w = softmax(c) of each head             S' = last S + k^T (α until)

The gradient of a gate's sum at token i and a slot is the read of c_i there less the
write of α_i there.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import packs
from memjax_kernels._src.common.packs import block_diagonal, diagonal_blocks
from memjax_kernels._src.common.packs.channels import Decays, decays, pairs, suffix_sums
from memjax_kernels._src.common.packs.chunk_kernels import Cotangents
from memjax_kernels._src.common.packs.recurrence_chunk import Channels, Gates
from memjax_kernels._src.common.products import multiply

BF16 = jnp.dtype(jnp.bfloat16)


def advance(
    x: Channels, start: Float[Array, "P K MM"]
) -> tuple[Float[Array, "P K MM"], Float[Array, "P C MM"]]:
    """The memory after a chunk, and how much of each slot a token reads; x.v is α."""
    left = decays(x.g)
    compared, _ = _compare(x, start, left)
    written = diagonal_blocks(x.dot(x.k, x.cast(x.v * left.until), "tn"), x.heads)
    return left.since[:, -1:] * start + written, _softmax(compared, x.heads)


def vjp(
    x: Channels,
    start: Float[Array, "P K MM"],
    d_after: Float[Array, "P K MM"],
    d_weights: Float[Array, "P C MM"],
) -> Cotangents:
    """The cotangents of a chunk, which is computed again from its memory."""
    heads, cast, dot = x.heads, x.cast, x.dot
    left = decays(x.g)
    compared, overlap = _compare(x, start, left)
    weights = _softmax(compared, heads)
    products = weights * d_weights
    d_c = products - weights * _sum_heads(products, heads)

    d_past = cast(left.since * d_c)
    d_memory = block_diagonal(cast(d_after), heads)
    d_written = left.until * dot(x.k, d_memory, "nn")
    past = dot(x.q, block_diagonal(cast(start), heads), "nn")
    d_overlap, d_alpha = jnp.zeros_like(overlap), d_written
    sums = d_past * past - x.v * d_written
    for chosen, f in zip(pairs(overlap), left.blocks, strict=True):
        alpha, d_read = cast(x.v * f), cast(d_c * f)
        seen, by_head = (
            cast(jnp.where(chosen, overlap, 0.0)),
            block_diagonal(alpha, heads),
        )
        reads, writes = (
            dot(seen, by_head, "nn"),
            diagonal_blocks(dot(seen, d_read, "tn"), heads),
        )
        d_overlap = jnp.where(chosen, dot(d_read, by_head, "nt"), d_overlap)
        d_alpha += f * writes
        # Of the rounded operands: what a pair adds here cancels for all gates but those
        # between its tokens.
        sums += d_read * reads - alpha * writes
    d_overlap = cast(d_overlap)
    d_q = dot(d_overlap, block_diagonal(x.k, heads), "nn")
    d_q += dot(d_past, block_diagonal(cast(start), heads), "nt")
    d_k = diagonal_blocks(dot(d_overlap, x.q, "tn"), heads)
    d_k += dot(cast(x.v * left.until), d_memory, "nt")
    decay = left.since[:, -1:] * d_after
    d_start = decay + diagonal_blocks(dot(x.q, d_past, "tn"), heads)
    # All that the memory after the chunk receives, at every token.
    end = packs.sum_slots(decay * start) + packs.sum_slots(x.v * d_written)
    d_tokens = d_q, d_k, d_alpha, suffix_sums(sums) + end
    return Cotangents(d_tokens, Gates(), d_start)


def _compare(
    x: Channels, start: Float[Array, "P K MM"], left: Decays
) -> tuple[Float[Array, "P C MM"], Float[Array, "P C CC"]]:
    """K̃ q of every token, and q kᵀ of every pair."""
    cast, dot = x.cast, x.dot
    overlap = dot(x.q, block_diagonal(x.k, x.heads), "nt")
    compared = left.since * dot(x.q, block_diagonal(cast(start), x.heads), "nn")
    for chosen, f in zip(pairs(overlap), left.blocks, strict=True):
        seen = cast(jnp.where(chosen, overlap, 0.0))
        compared += f * dot(seen, block_diagonal(cast(x.v * f), x.heads), "nn")
    return compared, overlap


def _softmax(x: Float[Array, "P C MM"], heads: int) -> Float[Array, "P C MM"]:
    """Over the slots of each head."""
    of = packs.head(x.shape, heads)
    largest = packs.widen(
        [
            jnp.max(jnp.where(of == i, x, -jnp.inf), axis=-1, keepdims=True)
            for i in range(heads)
        ],
        x.shape[-1],
    )
    powers = jnp.exp(x - largest)
    return powers / _sum_heads(powers, heads)


def _sum_heads(x: Float[Array, "P C MM"], heads: int) -> Float[Array, "P C MM"]:
    """Sums over each head's lanes, in all of them."""
    ones = jnp.ones((x.shape[0], x.shape[-1] // heads, x.shape[-1]), BF16)
    ones = block_diagonal(ones, heads)
    return packs.in_parts(lambda part: multiply(part, ones, "nn", BF16), x)
