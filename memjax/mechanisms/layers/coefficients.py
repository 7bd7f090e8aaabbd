"""Layouts of Elastic Memory's arrays, and the join of several devices' coefficients.

Keys and values follow the same recurrence: they are channels of one signal.

Shapes: B batch, L block, N order, G key-value heads, K head width, X = 2 G K channels,
J = G K channels of a token.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

from memjax.mechanisms.layers import projections
from memjax.mechanisms.layers.divided_sequence import join_shares
from memjax.mechanisms.layers.heads import HeadsConfig
from memjax.mechanisms.layers.saturating_counter import advanced
from memjax_kernels import (
    HippoBank,
    HippoSampling,
    build_hippo_bank,
    hippo_reconstruction,
    hippo_sample_points,
)
from memjax_kernels._src.hippo import on_demand


class Tables(NamedTuple):
    """Constants of Elastic Memory."""

    reconstruction: Float[np.ndarray, "M N"]
    bank: HippoBank | None


# Every trace of `step` and `apply` needs them, and they take float64 work to build.
@functools.lru_cache(maxsize=8)
def tables(
    *,
    order: int,
    block: int,
    bank_blocks: int,
    samples: int,
    sampling: HippoSampling,
    decay: float,
) -> Tables:
    """Builds the constants in float64 and rounds them once."""
    points = hippo_sample_points(samples, sampling, decay)
    bank = build_hippo_bank(order, block, bank_blocks) if bank_blocks else None
    return Tables(hippo_reconstruction(order, points).astype(np.float32), bank)


def to_channels(
    keys: Float[Array, "*B G K"], values: Float[Array, "*B G K"]
) -> Float[Array, "*B X"]:
    """Keys and values as channels of one signal, in float32."""
    both = jnp.stack([keys, values], axis=-3).astype(jnp.float32)
    return both.reshape(*both.shape[:-3], -1)


def from_channels(
    channels: Float[Array, "*B X"], heads: tuple[int, int]
) -> tuple[Float[Array, "*B G K"], Float[Array, "*B G K"]]:
    """Undoes `to_channels`; `heads` are G and K."""
    both = channels.reshape(*channels.shape[:-1], 2, *heads)
    return both[..., 0, :, :], both[..., 1, :, :]


def of_state(
    keys: Float[Array, "B G N K"], values: Float[Array, "B G N K"]
) -> Float[Array, "B N X"]:
    """The coefficients of a state as channels."""
    return to_channels(*(jnp.moveaxis(c, 1, 2) for c in (keys, values)))


def to_state(
    coefficients: Float[Array, "B N X"], heads: tuple[int, int]
) -> tuple[Float[Array, "B G N K"], Float[Array, "B G N K"]]:
    """Undoes `of_state`."""
    keys, values = from_channels(coefficients, heads)
    return jnp.moveaxis(keys, 2, 1), jnp.moveaxis(values, 2, 1)


def as_rows(
    config: HeadsConfig,
    keys: Float[Array, "B T G K"],
    values: Float[Array, "B T G K"],
    at: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T J"], Float[Array, "B T J"]]:
    """Keys with RoPE of their positions, and values, one row a token, in float32."""
    if at is None:
        at = jnp.arange(keys.shape[1], dtype=jnp.int32)
    keys, values = (x.astype(jnp.float32) for x in (keys, values))
    keys = projections.apply_rope(config, keys, at)
    return keys.reshape(*keys.shape[:2], -1), values.reshape(*values.shape[:2], -1)


def of_rows(
    config: HeadsConfig, keys: Float[Array, "B L J"], values: Float[Array, "B L J"]
) -> tuple[Float[Array, "B L G K"], Float[Array, "B L G K"]]:
    """Undoes `as_rows` for an open block."""
    heads = (config.num_kv_heads, config.head_dim)

    # Else a TPU keeps them as compression likes them, and decoding copies all of them.
    def rows(x):
        return with_layout_constraint(x, Layout((0, 1, 2)))

    keys, values = (rows(x).reshape(*x.shape[:2], *heads) for x in (keys, values))
    at = jnp.arange(keys.shape[1], dtype=jnp.int32)
    return projections.remove_rope(config, keys, at), values


def before_share(
    own: Float[Array, "B N X"],
    coefficients: Float[Array, "B N X"],
    length: Int[Array, " B"],
    time: int,
) -> tuple[Float[Array, "B N X"], Int[Array, " B"]]:
    """Coefficients and length before this device's tokens, inside `on_shares`.

    What a device compresses as if nothing came before are polynomials on its share
    alone, wherever that lies, and join those of the past: the recurrence telescopes.

    Args:
        own: coefficients of this device's tokens alone.
        coefficients: before the tokens of all devices.
        length: tokens in them, the same for all batch elements.
        time: tokens of a device.
    """

    def join(before, share):
        coefficients, length = before
        # One matrix serves all batch elements.
        first, stop = length[:1], length[:1] + time
        nodes = map(on_demand.to_nodes, (coefficients, share))
        after = on_demand.absorb(first, stop, *nodes)
        return after, advanced(length, jnp.full_like(length, time))

    return join_shares(join, (coefficients, length), own)[1]
