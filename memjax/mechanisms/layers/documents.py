"""Documents of packed rows: several in one row of tokens.

`starts` is True at the first token of each document. A row's first token always starts
one.

Shapes: B batch, T time.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def first_tokens(starts: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """Index in the row of the first token of each token's document."""
    places = jnp.arange(starts.shape[1], dtype=jnp.int32)[None]
    return jax.lax.cummax(jnp.where(starts, places, 0), axis=1)


def positions(starts: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """Position of each token in its document, from 0."""
    places = jnp.arange(starts.shape[1], dtype=jnp.int32)[None]
    return places - first_tokens(starts)


def check_starts(starts: Array, x: Array) -> None:
    """Raises ValueError unless starts are bool [B, T], as x [B, T, D] has them."""
    if starts.dtype != bool or starts.shape != x.shape[:2]:
        raise ValueError(
            f"starts must be bool{list(x.shape[:2])}, as x is, got {starts.dtype}"
            f"{list(starts.shape)}"
        )
