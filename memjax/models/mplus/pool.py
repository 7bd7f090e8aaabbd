"""M+'s short-term pool: an update drops K random rows and appends K new ones.

    θ_l ← [keep_{N-K}(θ_l) ; new_l]

Rows keep their order, and every layer draws its own rows to drop, uniformly over all N
as in the program. While the pool is not full, empty rows are dropped instead.

Wang et al. (2025), https://arxiv.org/abs/2502.00592, section 3.1.

Shapes: B batch, L layers, N rows, K new rows, D model.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from memjax import mechanisms
from memjax.models.offload import near
from memjax_kernels._src.common.partition import along_batch


class Dropped(NamedTuple):
    """Rows that an update dropped; empty ones where the pool was not full."""

    rows: Float[Array, "B L K D"]
    ages: Int[Array, "B L K"]


def of_layer(pool: Float[Array, "B L N D"], layer: int) -> Float[Array, "B N D"]:
    """One layer's rows, copied to the device from the host.

    On a mesh that divides their width they are whole on every device that reads them.
    """
    return along_batch(near(lambda pool: pool[:, layer], pool))


def draw_dropped(
    key: PRNGKeyArray, layers: int, rows: int, count: int
) -> Int[Array, "L K"]:
    """Draws `count` different rows for each layer, in rising order."""
    # On a CPU top_k of random numbers is twenty times as fast as a permutation.
    _, drawn = jax.lax.top_k(jax.random.uniform(key, (layers, rows)), count)
    return jnp.sort(drawn, axis=-1)


def draw_kept(
    key: PRNGKeyArray, layers: int, rows: int, count: int, num_valid: Int[Array, ""]
) -> Int[Array, "L n"]:
    """Draws the `count` rows of each layer that stay, in rising order.

    Rows that hold something are the last `num_valid`: none of them goes before all the
    others have.
    """
    drawn = jax.random.uniform(key, (layers, rows))
    empty = jnp.arange(rows, dtype=jnp.int32)[None] < rows - num_valid
    _, kept = jax.lax.top_k(jnp.where(empty, drawn - 1.0, drawn), count)
    return jnp.sort(kept, axis=-1)


def check_rows(name: str, rows: Int[Array, "B L n"], size: int) -> None:
    """Raises ValueError unless known indices are in [0, size), and rise in a layer.

    Inside jit nothing is known, and what other indices give has no meaning.
    """
    if isinstance(rows, Tracer):
        return
    known = np.asarray(rows)
    inside = not known.size or (known.min() >= 0 and known.max() < size)
    if not inside or np.any(np.diff(known, axis=-1) <= 0):
        raise ValueError(
            f"{name} must be different rows of the pool in rising order, in "
            f"[0, {size}), got {known.tolist()}"[:300]
        )


def replace(
    pool: Float[Array, "B L N D"],
    ages: Int[Array, "B L N"],
    num_valid: Int[Array, " B"],
    new: Float[Array, "B L K D"],
    dropped: Int[Array, "B L K"],
    changes: Bool[Array, " B"],
    advance: bool,
) -> tuple[Float[Array, "B L N D"], Int[Array, "B L N"], Dropped]:
    """Drops K rows of each layer and appends the new ones.

    Args:
        pool: the rows, of which the last `num_valid` hold something.
        ages: ages of the rows, in memory tokens.
        num_valid: a multiple of K.
        new: the new rows.
        dropped: rows to drop where the pool is full, rising.
        changes: batch elements that are updated; the others stay as they are.
        advance: whether the ages of old rows grow by K, before the drop; new rows have
            the ages K - 1 to 0.
    """
    rows, count = pool.shape[2], new.shape[2]
    places = functools.partial(jnp.arange, dtype=jnp.int32)
    full = (num_valid == rows)[:, None, None]
    # Valid rows are the last ones, so that the first K are empty until the pool is
    # full.
    dropped = jnp.where(full, dropped, places(count)[None, None])
    # The j-th row that stays has moved up by the dropped rows before it.
    before = dropped - places(count)[None, None]

    def moved(before):
        return jnp.searchsorted(before, places(rows - count), side="right")

    kept = places(rows - count)[None, None] + jax.vmap(jax.vmap(moved))(before)

    def move(pool, new, kept, dropped, changes):
        after = jnp.concatenate([_take(pool, kept), new], axis=2)
        return mechanisms.replace_rows(pool, after, changes), _take(pool, dropped)

    args = (new.astype(pool.dtype), kept.astype(jnp.int32), dropped, changes)
    pool, rows_out = near(move, pool, *args, stays=(True, False))
    # Before the drop, so that dropped rows have their age at the time of the update.
    old = ages + count if advance else ages
    newest = jnp.broadcast_to(places(count)[::-1][None, None], dropped.shape)
    after = jnp.concatenate([_take(old, kept), newest], axis=2)
    ages = mechanisms.replace_rows(ages, after, changes)
    return pool, ages, Dropped(rows_out, _take(old, dropped))


def _take(rows, at):
    return jax.vmap(jax.vmap(lambda rows, at: rows[at]))(rows, at)
