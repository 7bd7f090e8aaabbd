"""HMT's memory search: which memories a segment is read with.

    A = softmax((S W_q) (M W_k)ᵀ / √d_h);   P = A M

He et al. (2024), https://arxiv.org/abs/2405.06067, section 3.2. One head, float32,
values are the memories themselves.

Shapes: B batch, N slots, E width, d_h retrieval width.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def filled(bank: Float[Array, "B N E"], held: Int[Array, " B"]) -> Bool[Array, "B N"]:
    """Slots that hold a memory: the last `held` of each row."""
    slots = jnp.arange(bank.shape[1], dtype=jnp.int32)[None]
    return slots >= bank.shape[1] - held[:, None]


def search(
    bank: Float[Array, "B N E"],
    held: Int[Array, " B"],
    summary: Float[Array, "B E"],
    query: Float[Array, "E d"],
    key: Float[Array, "E d"],
) -> Float[Array, "B N"]:
    """A: softmax over the memories that are held, 0 in empty slots."""
    # In this order no key is made: E d + N E products a row instead of N E d.
    asked = (summary @ query) @ key.T
    scores = jnp.einsum("be,bne->bn", asked, bank) * query.shape[-1] ** -0.5
    real = filled(bank, held)
    # Finite, so that rows without memories have finite gradients.
    scores = jax.nn.softmax(jnp.where(real, scores, -1e30), axis=-1)
    return jnp.where(real, scores, 0.0)
