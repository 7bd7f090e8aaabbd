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

import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common.packs.chunk_kernels import Cotangents
from memjax_kernels._src.common.packs.recurrence_chunk import Chunk, Gates, at_end
from memjax_kernels._src.linear.packed_delta import products

F32 = jnp.float32


def advance(
    x: Chunk, start: Float[Array, "P K VV"]
) -> tuple[Float[Array, "P K VV"], Float[Array, "P C VV"]]:
    """The memory after a chunk, and its reads."""
    dot, _ = products(x)
    since, until = x.since(x.q.shape[-1]), x.until(x.k.shape[-1])
    scores = dot(x.q, x.k, "nt") * x.between()
    y = dot(scores, x.v, "nn") + dot(x.q * since, start, "nn")
    return x.whole(start.shape[-1]) * start + dot(x.k * until, x.v, "tn"), y


def vjp(
    x: Chunk,
    start: Float[Array, "P K VV"],
    d_after: Float[Array, "P K VV"],
    d_y: Float[Array, "P C VV"],
) -> Cotangents:
    """The cotangents of a chunk, which is computed again from its memory."""
    dot, _ = products(x)
    since, until = x.since(x.q.shape[-1]), x.until(x.k.shape[-1])
    between = x.between()
    scores = dot(x.q, x.k, "nt") * between
    d_scores = dot(d_y, x.v, "nt") * between

    d_q = dot(d_scores, x.k, "nn") + since * dot(d_y, start, "nt")
    d_written = until * dot(x.v, d_after, "nt")
    d_k = dot(d_scores, x.q, "tn") + d_written
    d_v = dot(scores, d_y, "tn") + dot(x.k * until, d_after, "nn")
    decay = x.whole(start.shape[-1]) * d_after
    d_start = decay + dot(x.q * since, d_y, "tn")

    q, k = x.q.astype(F32), x.k.astype(F32)
    sums = q * d_q - k * d_k + at_end(k * d_written, x.q.shape[1])
    end = at_end(decay * start, x.q.shape[1])
    return Cotangents((d_q, d_k, d_v), Gates((sums, end)), d_start)
