"""Softmax attention to a cache of keys and values."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from memjax.mechanisms.layers.softmax import on_tpu
from memjax.mechanisms.layers.softmax.dot_product_attention import (
    in_pieces,
    masked_with_mass,
)
from memjax_kernels import cached_attention
from memjax_kernels._src.cached_attention import pallas_tpu
from memjax_kernels._src.common.cpu import by_platform

# Slots that are read or left out together on an accelerator, at least: a branch takes
# about as long as reading thousands of them.
LEAST_PREFIX = 2048


def from_rows(
    query: Float[Array, "B T H K"],
    keys: Float[Array, "B S J"],
    values: Float[Array, "B S J"],
    before: Int[Array, " B"],
    visible: Bool[Array, "B S"],
) -> Float[Array, "B T H K"]:
    """Query t sees the visible ones of the keys 0 to before + t.

    A slot is a row of J = G K channels. Keys behind those that the batch sees take
    little time, however many there are. On a TPU a single query takes one kernel, and
    many, see `on_tpu`, another.
    """
    split = functools.partial(_by_head, width=query.shape[-1])
    room = keys.shape[1]
    # Captured arrays are computed outside of the branches.
    filled = before.max() + query.shape[1]

    def shortest(query, keys, values, before, visible, *, least, end=None):
        def prefix(size):
            def read():
                # Split in here, see `_apart_from_writes`.
                key, value = (split(x[:, :size]) for x in (keys, values))
                return in_pieces(query, key, value, before, visible[:, :size], end)

            return read

        return _shortest_prefix(room, filled, prefix, least)

    least = _apart_from_writes(room) if query.shape[1] == 1 else room
    apart = by_platform(
        functools.partial(shortest, least=least, end=filled),
        functools.partial(shortest, least=LEAST_PREFIX),
    )

    def behind_slots(query, keys, values, before, visible):
        at = before[:, None] + jnp.arange(query.shape[1], dtype=jnp.int32)[None]

        def own(x, at):
            return split(jnp.take_along_axis(x, at, axis=1, mode="clip"))

        key, value = (own(x, at[..., None]) for x in (keys, values))
        # A token that did not fit into the cache has no key there.
        fits = at < room
        shows = jnp.take_along_axis(visible, at, axis=1, mode="clip") & fits
        old = jnp.arange(keys.shape[1], dtype=jnp.int32)[None] < before[:, None]

        def prefix(size):
            def first(x):
                return split(x[:, :size])

            slots = (first(keys), first(values), (visible & old)[:, :size])
            return lambda: on_tpu.behind_slots(query, key, value, *slots, shows)

        return _shortest_prefix(room, before.max(), prefix, LEAST_PREFIX)

    def in_one_kernel(query, keys, values, before, visible):
        slots = jnp.arange(keys.shape[1], dtype=jnp.int32)[None]
        seen = visible & (slots <= before[:, None])
        return cached_attention(query, keys, values, seen[:, None])[0]

    given = (query, keys, values, before, visible)
    if query.shape[1] > 1:
        form, reason = behind_slots, on_tpu.unsupported(query, query)
    else:
        form, reason = in_one_kernel, pallas_tpu.unsupported(query, keys)
    if reason:
        return apart(*given)
    return jax.lax.platform_dependent(*given, tpu=form, default=apart)


def rows_with_mass(
    query: Float[Array, "B T H K"],
    keys: Float[Array, "B S J"],
    values: Float[Array, "B S J"],
    mask: Bool[Array, "B T S"],
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """`masked_with_mass` of a cache whose slots are rows; one kernel on a TPU."""

    def apart(query, keys, values, mask):
        slots = keys.shape[1]

        def prefix(size):
            # Split in here, see `_apart_from_writes`.
            def first(x):
                return _by_head(x[:, :size], query.shape[-1]).astype(query.dtype)

            given = mask[..., :size]
            return lambda: masked_with_mass(query, first(keys), first(values), given)

        seen = jnp.where(mask, jnp.arange(1, slots + 1, dtype=jnp.int32), 0)
        least = _apart_from_writes(slots)
        return _shortest_prefix(slots, seen.max(), prefix, least)

    return by_platform(apart, cached_attention)(query, keys, values, mask)


def _by_head(rows, width):
    """Rows [B, S, J] as heads [B, S, G, K] of a width."""
    return rows.reshape(*rows.shape[:2], -1, width)


def _apart_from_writes(slots):
    """`least` of two prefixes, so that a single query reads in a branch.

    Outside of one XLA on a CPU joins the reshape of a cache by heads with the write of
    the query's own token, and copies the cache for each.
    """
    return max(1, slots // 4)


def _shortest_prefix(slots, filled, prefix, least):
    """prefix(size)() of the smallest of a few sizes that has the first `filled` slots.

    The largest is all slots; each is a quarter of the one before, at least `least`.
    """
    sizes = [slots]
    while sizes[-1] >= 4 * least:
        sizes.append(-(-sizes[-1] // 4))
    which = sum((filled <= size).astype(jnp.int32) for size in sizes[1:])
    return jax.lax.switch(which, [prefix(size) for size in sizes])
