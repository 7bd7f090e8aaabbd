"""Delta rule in chunks of matrix products: the WY form.

Inside a chunk the writes U solve a unit lower-triangular system, because each
write sees what the ones before it left:

    (I + tril(β K Kᵀ, -1)) U = β (V - K S)      S ← S + Kᵀ U      Y = Q S + tril(Q Kᵀ) U

Yang et al. (2024), https://arxiv.org/abs/2406.06484, section 3.2.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def delta_rule_xla(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    beta: Float[Array, "B T H"],
    state: Float[Array, "B H K V"],
    chunk_size: int = 64,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """The recurrence of `delta_rule_reference`, a chunk at a time, in float32."""
    t = q.shape[1]
    size = min(chunk_size, t)

    def chunked(x):
        # A padded token writes with rate 0 and its read is dropped.
        pad = ((0, 0), (0, -t % size)) + ((0, 0),) * (x.ndim - 2)
        x = jnp.pad(x.astype(jnp.float32), pad)
        x = x.reshape(x.shape[0], -1, size, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2))

    items = (chunked(q), chunked(k), chunked(v), chunked(beta))
    state, y = jax.lax.scan(jax.checkpoint(_chunk), state, items)
    y = jnp.moveaxis(y, (0, 2), (1, 3)).reshape(y.shape[1], -1, *v.shape[2:])
    return state, y[:, :t].astype(v.dtype)


def _chunk(state, item):
    q, k, v, beta = item  # [B, H, C, ...]
    overlap = jnp.tril(jnp.einsum("bhik,bhjk->bhij", beta[..., None] * k, k), -1)
    error = beta[..., None] * (v - jnp.einsum("bhck,bhkv->bhcv", k, state))
    writes = jax.scipy.linalg.solve_triangular(
        overlap + jnp.eye(k.shape[2])[None, None], error, lower=True, unit_diagonal=True
    )
    seen = jnp.tril(jnp.einsum("bhik,bhjk->bhij", q, k))
    y = jnp.einsum("bhck,bhkv->bhcv", q, state)
    y += jnp.einsum("bhij,bhjv->bhiv", seen, writes)
    return state + jnp.einsum("bhck,bhcv->bhkv", k, writes), y
