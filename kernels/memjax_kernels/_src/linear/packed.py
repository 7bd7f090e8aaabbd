"""One chunk of S ← exp(g) S + k vᵀ, y = Sᵀq for packed heads, and its gradient.

`chunks.linear_group` has the same equations for any leading axes. Here arrays have a
leading axis of P packs of heads (`common.packs`): tokens are [P, C, KK] and [P, C, VV],
memories [P, K, VV]. With W the decays between tokens, since and until those from the
chunk's start and to its end, and D(.) `packs.block_diagonal`:

    y = ((q D(k)^T) W) D(v) + (q since) D(S)
    S' = last S + (k until)^T v

The gradient of a gate's sum at token i is the read of q_i less the write of k_i: the
decay factors out of both. At the chunk's end the gradient of S' is added.
"""

import functools
import operator

import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common.packs import block_diagonal, diagonal_blocks
from memjax_kernels._src.common.packs import decays as pack_decays
from memjax_kernels._src.common.packs.recurrence_kernels import (
    Chunk,
    Cotangents,
    at_end,
)
from memjax_kernels._src.common.products import multiply, operand_dtype

F32 = jnp.float32


def advance(
    x: Chunk, start: Float[Array, "P K VV"]
) -> tuple[Float[Array, "P K VV"], Float[Array, "P C VV"]]:
    """The memory after a chunk, and its reads."""
    heads = len(x.total.column)
    cast = operator.methodcaller("astype", x.q.dtype)
    dot = functools.partial(multiply, dtype=operand_dtype(x.q))
    since, until = x.since(x.q.shape[-1]), x.until(x.k.shape[-1])
    between = pack_decays.decays(x.total).between
    scores = cast(dot(x.q, block_diagonal(x.k, heads), "nt") * between)
    y = dot(scores, block_diagonal(x.v, heads), "nn")
    y += dot(cast(x.q * since), block_diagonal(cast(start), heads), "nn")
    written = diagonal_blocks(dot(cast(x.k * until), x.v, "tn"), heads)
    return pack_decays.decay_at_end(x.total, start.shape[-1]) * start + written, y


def vjp(
    x: Chunk,
    start: Float[Array, "P K VV"],
    d_after: Float[Array, "P K VV"],
    d_y: Float[Array, "P C VV"],
) -> Cotangents:
    """The cotangents of a chunk, which is computed again from its memory."""
    heads = len(x.total.column)
    cast = operator.methodcaller("astype", x.q.dtype)
    dot = functools.partial(multiply, dtype=operand_dtype(x.q))

    def rows(*parts):
        return jnp.concatenate([cast(part) for part in parts], axis=1)

    since, until = x.since(x.q.shape[-1]), x.until(x.k.shape[-1])
    between = pack_decays.decays(x.total).between
    d_y, d_memory = cast(d_y), block_diagonal(cast(d_after), heads)
    scores = cast(dot(x.q, block_diagonal(x.k, heads), "nt") * between)
    d_scores = cast(dot(d_y, block_diagonal(x.v, heads), "nt") * between)

    d_past = since * dot(d_y, block_diagonal(cast(start), heads), "nt")
    d_q = dot(d_scores, block_diagonal(x.k, heads), "nn") + d_past
    d_written = until * dot(x.v, d_memory, "nt")
    d_k = diagonal_blocks(dot(d_scores, x.q, "tn"), heads) + d_written
    d_v = diagonal_blocks(dot(scores, d_y, "tn"), heads)
    d_v += dot(cast(x.k * until), d_memory, "nn")
    decay = pack_decays.decay_at_end(x.total, start.shape[-1]) * d_after
    d_start = decay + diagonal_blocks(dot(rows(x.q * since), d_y, "tn"), heads)

    q, k = x.q.astype(F32), x.k.astype(F32)
    sums = q * d_q - k * d_k + at_end(k * d_written, x.q.shape[1])
    end = at_end(decay * start, x.q.shape[1])
    return Cotangents((d_q, d_k, d_v), d_start, (sums, end))
