"""The delta rule, gated or not, in chunks of matrix products: the WY form.

Inside a chunk the writes U solve a unit lower-triangular system, because each write
sees what the ones before it left. With G the gates summed from the chunk's start and
D_ij = exp(G_i - G_j) for i >= j:

    (I + tril(β K Kᵀ ∘ D, -1)) U = β (V - e^G K S)
    Y = e^G Q S + (Q Kᵀ ∘ D) U        S ← e^{G_C} S + (D_C: ∘ K)ᵀ U

No exponent is positive, and none is inverted. Across a reset D is zero.

Yang et al. (2024), https://arxiv.org/abs/2406.06484, section 3.2, and with gates
Yang, Kautz & Hatamizadeh (2024), https://arxiv.org/abs/2412.06464, section 3.3.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels import chunks

_EXACT = jax.lax.Precision.HIGHEST


def delta_rule_xla(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    beta: Float[Array, "B T H"],
    g: Float[Array, "B T H"] | None,
    state: Float[Array, "B H K V"],
    reset: Bool[Array, "B T"] | None = None,
    *,
    chunk_size: int = 64,
    remat_every: int = 4,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """The recurrence of `gated_delta_rule_reference`, a chunk at a time, in float32.

    Args:
        q: queries.
        k: keys.
        v: values.
        beta: write rates.
        g: log gates; None is no decay.
        state: the memory before the segment.
        reset: tokens before which the memory is emptied.
        chunk_size: C; it does not change what is computed.
        remat_every: chunks between two memories kept for the backward pass.
    """
    time = q.shape[1]
    size = min(chunk_size, time)

    def chunked(x):
        # A token of zeros neither writes nor decays, and its read is dropped.
        x = x if x.dtype == bool else x.astype(jnp.float32)
        x = jnp.moveaxis(chunks.split(x, size, None), 1, 0)
        return x if x.ndim == 3 else jnp.moveaxis(x, 2, 3)

    items = jax.tree.map(chunked, (q, k, v, beta, g, reset))
    state, y = chunks.scan(_chunk, state, items, remat_every=remat_every)
    y = jnp.moveaxis(y, (0, 2), (1, 3))
    return state, chunks.join(y, time, None).astype(v.dtype)


def _chunk(state, item):
    q, k, v, beta, g, reset = item  # [B, H, C, ...], reset [B, C]
    kept, decay = _decays(k.shape[2], g, reset)
    product = lambda a, b: jnp.einsum("bhik,bhjk->bhij", a, b, precision=_EXACT)
    overlap = jnp.tril(beta[..., None] * product(k, k) * decay, -1)
    recalled = kept[..., None] * jnp.einsum("bhck,bhkv->bhcv", k, state)
    # By substitution: a product of powers of the overlap would cancel
    # catastrophically where keys repeat.
    writes = jax.scipy.linalg.solve_triangular(
        overlap + jnp.eye(k.shape[2])[None, None],
        beta[..., None] * (v - recalled),
        lower=True,
        unit_diagonal=True,
    )
    y = kept[..., None] * jnp.einsum("bhck,bhkv->bhcv", q, state)
    y += jnp.einsum("bhij,bhjv->bhiv", product(q, k) * decay, writes)
    written = jnp.einsum("bhck,bhcv->bhkv", decay[..., -1, :, None] * k, writes)
    return kept[..., -1, None, None] * state + written, y


def _decays(size, g, reset):
    """What each token sees of the chunk's start, [B, H, C], and of each write."""
    if g is None:
        kept = jnp.ones((1, 1, size), jnp.float32)
        decay = jnp.tril(jnp.ones((1, 1, size, size), jnp.float32))
    else:
        kept, decay = jnp.exp(jnp.cumsum(g, axis=-1)), chunks.decay(g)
    if reset is None:
        return kept, decay
    segment = chunks.segments(reset)
    same = segment[:, :, None] == segment[:, None, :]
    kept = jnp.where(segment[:, None] == 0, kept, 0.0)
    return kept, jnp.where(same[:, None], decay, 0.0)
