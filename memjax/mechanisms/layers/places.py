"""Tokens as rows, and their shifts by another position in each batch element.

Shapes: B batch, T time, G key-value heads, K head width, J = G K channels.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from memjax.mechanisms.layers.heads import HeadsConfig


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


def token_rows(x: Float[Array, "B T G K"]) -> Float32[Array, "B T J"]:
    """The heads of a token in one row, in float32."""
    return x.reshape(*x.shape[:2], -1).astype(jnp.float32)


def token_heads(
    config: HeadsConfig, rows: Float[Array, "*B J"], dtype: jnp.dtype
) -> Float[Array, "*B G K"]:
    """Undoes `token_rows`, in the dtype of attention."""
    heads = (config.num_kv_heads, config.head_dim)
    return rows.reshape(*rows.shape[:-1], *heads).astype(dtype)
