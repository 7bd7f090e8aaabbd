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


def from_cache(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B S G K"],
    value: Float[Array, "B S G K"],
    before: Int[Array, " B"],
    visible: Bool[Array, "B S"] | None = None,
) -> Float[Array, "B T H K"]:
    """Query t sees the visible ones of the keys 0 to before + t.

    Keys behind those that the batch sees take little time, however many there are.
    """
    filled = before.max() + query.shape[1]
    # Captured arrays are computed outside of the branches.
    given = (before, visible, filled)
    return by_platform(
        lambda q, k, v: in_pieces(q, k, v, *given),
        lambda q, k, v: _prefix(q, k, v, *given),
    )(query, key, value)


def from_rows(
    query: Float[Array, "B T H K"],
    keys: Float[Array, "B S J"],
    values: Float[Array, "B S J"],
    before: Int[Array, " B"],
    visible: Bool[Array, "B S"],
) -> Float[Array, "B T H K"]:
    """`from_cache` of a cache whose slots are rows of J = G K channels.

    On a TPU a single query takes one kernel, and many, see `on_tpu`, another.
    """
    split = functools.partial(_by_head, width=query.shape[-1])

    def apart(query, keys, values, *given):
        return from_cache(query, split(keys), split(values), *given)

    def behind_slots(query, keys, values, before, visible):
        at = before[:, None] + jnp.arange(query.shape[1], dtype=jnp.int32)[None]

        def own(x, at):
            return split(jnp.take_along_axis(x, at, axis=1, mode="clip"))

        key, value = (own(x, at[..., None]) for x in (keys, values))
        # A token that did not fit into the cache has no key there.
        fits = at < keys.shape[1]
        shows = jnp.take_along_axis(visible, at, axis=1, mode="clip") & fits
        old = jnp.arange(keys.shape[1], dtype=jnp.int32)[None] < before[:, None]

        def prefix(size):
            def first(x):
                return split(x[:, :size])

            slots = (first(keys), first(values), (visible & old)[:, :size])
            return lambda: on_tpu.behind_slots(query, key, value, *slots, shows)

        return _shortest_prefix(keys.shape[1], before.max(), prefix)

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
        key, value = (
            _by_head(x, query.shape[-1]).astype(query.dtype) for x in (keys, values)
        )
        return masked_with_mass(query, key, value, mask)

    return by_platform(apart, cached_attention)(query, keys, values, mask)


def _by_head(rows, width):
    """Rows [B, S, J] as heads [B, S, G, K] of a width."""
    return rows.reshape(*rows.shape[:2], -1, width)


def _prefix(query, key, value, before, visible, filled):
    """`from_cache` of the slots up to the last that is seen, or a few more."""

    def prefix(size):
        seen = None if visible is None else visible[:, :size]
        return lambda: in_pieces(query, key[:, :size], value[:, :size], before, seen)

    return _shortest_prefix(key.shape[1], filled, prefix)


def _shortest_prefix(slots, filled, prefix):
    """prefix(size)() of the smallest of a few sizes that has the first `filled` slots.

    The largest is all slots; each is a quarter of the one before.
    """
    sizes = [slots]
    while sizes[-1] >= 4 * LEAST_PREFIX:
        sizes.append(-(-sizes[-1] // 4))
    which = sum((filled <= size).astype(jnp.int32) for size in sizes[1:])
    return jax.lax.switch(which, [prefix(size) for size in sizes])
