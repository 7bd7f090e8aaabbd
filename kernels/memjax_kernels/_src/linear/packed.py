"""One chunk of S ← exp(g) S + k vᵀ, y = Sᵀq for packs of heads, and its gradient.

`chunks.linear_group` has the same equations for any leading axes. Here arrays have a
leading axis of P packs of heads (`common.packs`): tokens are [P, C, KK] and [P, C, VV],
memories [P, K, VV]. With W the decays between tokens, since and until those from the
chunk's start and to its end, and D(.) `packs.diagonal`:

    y = ((q D(k)^T) W) D(v) + (q since) D(S)
    S' = last S + (k until)^T v

The gradient of a gate's sum at token i is what q_i reads less what k_i writes: the
decay factors out of both. At the chunk's end all that S' receives is added.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common.packs import decays as pack_decays
from memjax_kernels._src.common.packs import diagonal, own
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

    def low(y):
        return y.astype(x.q.dtype)

    dot = functools.partial(multiply, dtype=operand_dtype(x.q))
    since, until = x.since(x.q.shape[-1]), x.until(x.k.shape[-1])
    between = pack_decays.decays(x.total).between
    scores = low(dot(x.q, diagonal(x.k, heads), "nt") * between)
    y = dot(scores, diagonal(x.v, heads), "nn")
    y += dot(low(x.q * since), diagonal(low(start), heads), "nn")
    written = own(dot(low(x.k * until), x.v, "tn"), heads)
    return pack_decays.kept_at_end(x.total, start.shape[-1]) * start + written, y


def pull_back(
    x: Chunk,
    start: Float[Array, "P K VV"],
    d_after: Float[Array, "P K VV"],
    d_y: Float[Array, "P C VV"],
) -> Cotangents:
    """The cotangents of a chunk, which is computed again from its memory."""
    heads = len(x.total.column)

    def low(y):
        return y.astype(x.q.dtype)

    dot = functools.partial(multiply, dtype=operand_dtype(x.q))

    def rows(*parts):
        return jnp.concatenate([low(part) for part in parts], axis=1)

    since, until = x.since(x.q.shape[-1]), x.until(x.k.shape[-1])
    between = pack_decays.decays(x.total).between
    d_y, d_memory = low(d_y), diagonal(low(d_after), heads)
    scores = low(dot(x.q, diagonal(x.k, heads), "nt") * between)
    d_scores = low(dot(d_y, diagonal(x.v, heads), "nt") * between)

    d_past = since * dot(d_y, diagonal(low(start), heads), "nt")
    d_q = dot(d_scores, diagonal(x.k, heads), "nn") + d_past
    d_written = until * dot(x.v, d_memory, "nt")
    d_k = own(dot(d_scores, x.q, "tn"), heads) + d_written
    d_v = own(dot(scores, d_y, "tn"), heads)
    d_v += dot(low(x.k * until), d_memory, "nn")
    kept = pack_decays.kept_at_end(x.total, start.shape[-1]) * d_after
    d_start = kept + own(dot(rows(x.q * since), d_y, "tn"), heads)

    q, k = x.q.astype(F32), x.k.astype(F32)
    sums = q * d_q - k * d_k + at_end(k * d_written, x.q.shape[1])
    end = at_end(kept * start, x.q.shape[1])
    return Cotangents((d_q, d_k, d_v), d_start, (sums, end))
