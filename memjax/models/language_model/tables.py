"""Rows of tables of embeddings and of learned positions."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def rows_of(table: Float[Array, "N E"], at: Int[Array, "B T"]) -> Float[Array, "B T E"]:
    """Rows; NaN where there is none, as nothing can be raised inside jit."""
    return table.at[at].get(
        mode="fill", fill_value=jnp.nan, wrap_negative_indices=False
    )


def next_positions(
    taken: Int[Array, " B"],
    x: Float[Array, "B T D"],
    mask: Bool[Array, "B T"] | None,
) -> tuple[Int[Array, " B"], Int[Array, "B T"]]:
    """How many rows of OPT's table are taken after new tokens, and theirs.

    Visible tokens take the next positions, from row 2 on; masked ones share row 1.
    """
    visible = jnp.ones(x.shape[:2], bool) if mask is None else mask
    counted = taken[:, None] + jnp.cumsum(visible, axis=1, dtype=jnp.int32)
    return counted[:, -1], jnp.where(visible, counted + 1, 1)
