"""Delta rules, gated or not, in chunks of matrix products: the WY form.

Inside a chunk the writes U solve a unit lower-triangular system, because each write
depends on those before it. With E the keys that are erased and W the values that are
written, βK and βV where β is of a head, D_ij the decay from token j to token i, and d_i
that from the chunk's start, of a head or of each channel of keys:

    (I + tril(E Kᵀ ∘ D, -1)) U = W - (d E) S
    Y = (d Q) S + (Q Kᵀ ∘ D) U        S ← d_C S + (D_C ∘ K)ᵀ U

Yang et al. (2024), https://arxiv.org/abs/2406.06484, section 3.2; with gates of a head
Yang, Kautz & Hatamizadeh (2024), https://arxiv.org/abs/2412.06464, section 3.3; of a
channel Kimi Team (2025), https://arxiv.org/abs/2510.26692, section 3.1.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import decays
from memjax_kernels._src.common.products import multiplier, operand_dtype
from memjax_kernels._src.linear import triangular


def delta_group(
    state: Float[Array, "B H K V"],
    q: Float[Array, "n B H C K"],
    k: Float[Array, "n B H C K"],
    v: Float[Array, "n B H C V"],
    beta: Float[Array, "n B H C 1"],
    g: Float[Array, "n B H C G"] | None,
    reset: Bool[Array, "n B C"] | None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "n B H C V"]]:
    """A group of chunks that erase and write at one rate; G is 1 or K."""
    return gdn2_group(state, q, k, v, beta, beta, g, reset)


def gdn2_group(
    state: Float[Array, "B H K V"],
    q: Float[Array, "n B H C K"],
    k: Float[Array, "n B H C K"],
    v: Float[Array, "n B H C V"],
    erase: Float[Array, "n B H C E"],
    write: Float[Array, "n B H C W"],
    g: Float[Array, "n B H C G"] | None,
    reset: Bool[Array, "n B C"] | None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "n B H C V"]]:
    """A group of chunks: the writes are solved for before the memory is known.

    Gates are of each channel, or one for all.
    """
    # Float32 products for the memory, whatever the tokens are: errors grow
    # through the solution, and from chunk to chunk.
    exact, read = multiplier(jnp.dtype(jnp.float32)), multiplier(operand_dtype(q, k, v))
    dtype = v.dtype
    q, k, v, erase, write = (x.astype(jnp.float32) for x in (q, k, v, erase, write))
    left = decays.decays(g, reset, q.shape[-2])

    erased = erase * k
    # Below the diagonal: a write sees those before it, and not itself.
    if left.matrix is None:
        # Many small products: one call for both compiles faster.
        scores, reads = decays.scores((erased, q), k, left, exact)
    else:
        (scores,) = decays.scores((erased,), k, left, exact)
        (reads,) = decays.scores((q,), k, left, read)
    inverse = triangular.inverse(jnp.tril(scores, -1))
    # U = values - keys S: solved before S is known, so that all chunks are solved at
    # once.
    values, keys = (exact(inverse, x, "nn") for x in (write * v, left.since * erased))

    def move(state, item):
        values, keys, k, decay = item
        writes = values - exact(keys, state, "nn")
        return decay[..., None] * state + exact(k, writes, "tn"), (writes, state)

    decay = left.since[..., -1, :]
    decay = jnp.broadcast_to(decay, (*k.shape[:3], decay.shape[-1]))
    items = (values, keys, k * left.until, decay)
    state, (writes, starts) = jax.lax.scan(move, state, items)
    # Reads do not feed back into the memory, so that they may run in bfloat16.
    y = read(reads, writes, "nn")
    return state, (y + read(q * left.since, starts, "nn")).astype(dtype)
