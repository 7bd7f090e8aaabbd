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

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels.common import packs
from memjax_kernels.common.packs import decays as pack_decays
from memjax_kernels.common.packs import diagonal, own
from memjax_kernels.common.packs.decays import Totals
from memjax_kernels.common.products import Multiply

F32 = jnp.float32


class Chunk(NamedTuple):
    """Tokens of one chunk, and what their gates leave.

    Attributes:
        q: queries.
        k: keys.
        v: values.
        total: sums of the gates.
        since: from the chunk's start, in the lanes of the keys.
        until: to its end.
    """

    q: Float[Array, "P C KK"]
    k: Float[Array, "P C KK"]
    v: Float[Array, "P C VV"]
    total: Totals
    since: Float[Array, "P C KK"]
    until: Float[Array, "P C KK"]


class Cotangents(NamedTuple):
    """Of the tokens and the memory.

    Attributes:
        q: of the queries.
        k: of the keys.
        v: of the values.
        sums: of the gates' sums, before the sum over a head's lanes.
        end: the same of the memory, in the row of the last token.
        start: of the memory before the chunk.
    """

    q: Float[Array, "P C KK"]
    k: Float[Array, "P C KK"]
    v: Float[Array, "P C VV"]
    sums: Float[Array, "P C KK"]
    end: Float[Array, "P C VV"]
    start: Float[Array, "P K VV"]


def advance(
    x: Chunk, start: Float[Array, "P K VV"], dot: Multiply
) -> tuple[Float[Array, "P K VV"], Float[Array, "P C VV"]]:
    """The memory after a chunk, and its reads."""
    heads = len(x.total.column)
    low = lambda y: y.astype(x.q.dtype)
    between = pack_decays.decays(x.total).between
    scores = low(dot(x.q, diagonal(x.k, heads), "nt") * between)
    y = dot(scores, diagonal(x.v, heads), "nn")
    y += dot(low(x.q * x.since), diagonal(low(start), heads), "nn")
    written = own(dot(low(x.k * x.until), x.v, "tn"), heads)
    return pack_decays.kept_at_end(x.total, start.shape[-1]) * start + written, y


def pull_back(
    x: Chunk,
    start: Float[Array, "P K VV"],
    d_after: Float[Array, "P K VV"],
    d_y: Float[Array, "P C VV"],
    dot: Multiply,
) -> Cotangents:
    """The cotangents of a chunk, which is computed again from its memory."""
    heads = len(x.total.column)
    low = lambda y: y.astype(x.q.dtype)
    rows = lambda *parts: jnp.concatenate([low(part) for part in parts], axis=1)
    between = pack_decays.decays(x.total).between
    d_y, d_memory = low(d_y), diagonal(low(d_after), heads)
    scores = low(dot(x.q, diagonal(x.k, heads), "nt") * between)
    d_scores = low(dot(d_y, diagonal(x.v, heads), "nt") * between)

    d_past = x.since * dot(d_y, diagonal(low(start), heads), "nt")
    d_q = dot(d_scores, diagonal(x.k, heads), "nn") + d_past
    d_written = x.until * dot(x.v, d_memory, "nt")
    d_k = own(dot(d_scores, x.q, "tn"), heads) + d_written
    d_v = own(dot(scores, d_y, "tn"), heads)
    d_v += dot(low(x.k * x.until), d_memory, "nn")
    kept = pack_decays.kept_at_end(x.total, start.shape[-1]) * d_after
    d_start = kept + own(dot(rows(x.q * x.since), d_y, "tn"), heads)

    q, k = x.q.astype(F32), x.k.astype(F32)
    sums = q * d_q - k * d_k + _at_end(k * d_written, x.q.shape[1])
    end = _at_end(kept * start, x.q.shape[1])
    return Cotangents(d_q, d_k, d_v, sums, end, d_start)


def _at_end(x: Float[Array, "P N D"], size: int) -> Float[Array, "P C D"]:
    """The sum over rows, in the row of the last of `size` tokens."""
    shape = (x.shape[0], size, x.shape[-1])
    last = packs.sublane(shape) == size - 1
    return jnp.where(last, packs.sum_slots(x), 0.0)
