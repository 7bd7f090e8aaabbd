"""M+'s short-term pool: an update drops K random rows and appends K new ones.

    θ_l ← [keep_{N-K}(θ_l) ; new_l]        rows keep their order, layers drop apart

Wang et al. (2025), https://arxiv.org/abs/2502.00592, section 3.1; uniform over all N
rows, as in the program. While the pool is not full, what goes is empty room.

Shapes: B batch, L layers, N rows, K new rows, D model.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from memjax import mechanisms
from memjax.models.offload import near


class Dropped(NamedTuple):
    """What left the pool; empty rows where the pool was not full."""

    rows: Float[Array, "B L K D"]
    ages: Int[Array, "B L K"]


def of_layer(pool: Float[Array, "B L N D"], layer: int) -> Float[Array, "B N D"]:
    """One layer's rows, on the device."""
    return near(lambda pool: pool[:, layer], pool)


def draw_dropped(
    key: PRNGKeyArray, layers: int, rows: int, count: int
) -> Int[Array, "L K"]:
    """Rows to drop in each layer: `count` different ones in rising order."""
    # The largest of numbers in float32: a CPU is twenty times as long at permutations.
    _, drawn = jax.lax.top_k(jax.random.uniform(key, (layers, rows)), count)
    return jnp.sort(drawn, axis=-1)


def replace(
    pool: Float[Array, "B L N D"],
    ages: Int[Array, "B L N"],
    num_valid: Int[Array, " B"],
    new: Float[Array, "B L K D"],
    dropped: Int[Array, "B L K"],
    changes: Bool[Array, " B"],
    advance: bool,
) -> tuple[Float[Array, "B L N D"], Int[Array, "B L N"], Dropped]:
    """One update.

    Args:
        pool: the rows, of which the last `num_valid` are filled.
        ages: theirs.
        num_valid: filled rows, a multiple of K.
        new: the new rows.
        dropped: rows to drop where the pool is full, rising.
        changes: rows of the batch that are updated; the others stay as they are.
        advance: whether the ages of old rows grow by K, before the drop; new rows have
            the ages K - 1 to 0.
    """
    rows, count = pool.shape[2], new.shape[2]
    places = functools.partial(jnp.arange, dtype=jnp.int32)
    full = (num_valid == rows)[:, None, None]
    dropped = jnp.where(full, dropped, places(count)[None, None])
    # The j-th row that stays has moved up by the dropped rows before it.
    before = dropped - places(count)[None, None]
    moved = lambda before: jnp.searchsorted(before, places(rows - count), side="right")
    kept = places(rows - count)[None, None] + jax.vmap(jax.vmap(moved))(before)

    def move(pool, new, kept, dropped, changes):
        after = jnp.concatenate([_take(pool, kept), new], axis=2)
        return mechanisms.reset(pool, after, changes), _take(pool, dropped)

    args = (new, kept.astype(jnp.int32), dropped, changes)
    pool, rows_out = near(move, pool, *args, stays=(True, False))
    old = ages + count if advance else ages
    newest = jnp.broadcast_to(places(count)[::-1][None, None], dropped.shape)
    after = jnp.concatenate([_take(old, kept), newest], axis=2)
    ages = mechanisms.reset(ages, after, changes)
    return pool, ages, Dropped(rows_out, _take(old, dropped))


def _take(rows, at):
    return jax.vmap(jax.vmap(lambda rows, at: rows[at]))(rows, at)
