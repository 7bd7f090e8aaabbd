"""Shifts of tokens, by another position in each batch element.

Shapes: B batch, T time.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def lay_out(
    size: int,
    places: Int[Array, " B"],
    before: Float[Array, "B L ..."],
    new: Float[Array, "B T ..."],
) -> Float[Array, "B size ..."]:
    """New tokens behind the first `places` of those before, then zeros; in float32."""
    new = new.astype(jnp.float32)
    room = size - before.shape[1]
    before = jnp.pad(before, ((0, 0), (0, room)) + ((0, 0),) * (new.ndim - 2))

    def place(row, tokens, at):
        return jax.lax.dynamic_update_slice_in_dim(row, tokens, at, 0)

    return jax.vmap(place)(before, new, places)


def take(
    tokens: Float[Array, "B T ..."], places: Int[Array, " B"], length: int
) -> Float[Array, "B length ..."]:
    """`length` tokens of each batch element from its own position, then zeros."""
    # Without the padding `dynamic_slice` would move a slice that passes the end.
    pad = ((0, 0), (0, length)) + ((0, 0),) * (tokens.ndim - 2)

    def slice_(row, at):
        return jax.lax.dynamic_slice_in_dim(row, at, length, 0)

    return jax.vmap(slice_)(jnp.pad(tokens, pad), places)
