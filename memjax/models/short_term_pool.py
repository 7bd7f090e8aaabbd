"""M+'s short-term pool: an update drops K random rows and appends K new ones.

    θ_l ← [keep_{N-K}(θ_l) ; new_l]        rows keep their order, layers drop apart

Wang et al. (2025), https://arxiv.org/abs/2502.00592, section 3.1; uniform over all N
rows, as in the program. While the pool is not full, what goes is empty room.

Shapes: L layers, N rows, K new rows, D model.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray


class Dropped(NamedTuple):
    """What left the pool; empty rows where the pool was not full."""

    rows: Float[Array, "L K D"]
    ages: Int[Array, "L K"]


def draw_dropped(
    key: PRNGKeyArray, layers: int, rows: int, count: int
) -> Int[Array, "L K"]:
    """Rows to drop in each layer: `count` different ones in rising order."""
    keys = jax.random.split(key, layers)
    draw = lambda key: jnp.sort(jax.random.permutation(key, rows)[:count])
    return jax.vmap(draw)(keys).astype(jnp.int32)


def replace(
    pool: Float[Array, "L N D"],
    ages: Int[Array, "L N"],
    held: Int[Array, ""],
    new: Float[Array, "L K D"],
    dropped: Int[Array, "L K"],
    advance: bool,
) -> tuple[Float[Array, "L N D"], Int[Array, "L N"], Dropped]:
    """One update of one row of the batch.

    Args:
        pool: the rows, of which the last `held` are filled.
        ages: theirs.
        held: filled rows, a multiple of K.
        new: the new rows.
        dropped: rows to drop where the pool is full, rising.
        advance: whether the ages of old rows grow by K, before the drop; new rows have
            the ages K - 1 to 0.
    """
    rows, count = pool.shape[1], new.shape[1]
    room = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32)[None], dropped.shape)
    dropped = jnp.where(held == rows, dropped, room)
    if advance:
        ages = ages + count

    def one(pool, ages, new, dropped):
        # The j-th row that stays has moved up by the dropped rows before it.
        places = jnp.arange(rows - count, dtype=jnp.int32)
        before = dropped - jnp.arange(count, dtype=jnp.int32)
        kept = places + jnp.searchsorted(before, places, side="right").astype(jnp.int32)
        newest = jnp.arange(count - 1, -1, -1, dtype=jnp.int32)
        after = jnp.concatenate([pool[kept], new])
        return (
            after,
            jnp.concatenate([ages[kept], newest]),
            pool[dropped],
            ages[dropped],
        )

    after, ages, rows_out, ages_out = jax.vmap(one)(pool, ages, new, dropped)
    return after, ages, Dropped(rows_out, ages_out)
