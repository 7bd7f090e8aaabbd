"""Queries and keys with RoPE, in the form that each device is fast at.

Shapes: B batch, T time, D model, H query heads, G key-value heads, K head width.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from memjax.mechanisms.layers import projections, rope
from memjax.mechanisms.layers.projections import (
    Adapted,
    AttentionParams,
    HeadsConfig,
    linear,
)
from memjax_kernels.common.cpu import exact_product
from memjax_kernels.common.partition import by_heads


def rotated_qkv_projection(
    config: HeadsConfig,
    params: AttentionParams,
    x: Float[Array, "B T D"],
    positions: Int[Array, "*B T"],
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"], Float[Array, "B T G K"]]:
    """Queries and keys with RoPE, and values; see `projections`.

    On a TPU the partner of each channel comes from a product of its own, with weights
    whose channels are exchanged: there a product of this size takes less time than
    moving channels, which are no whole registers.
    """

    def in_turn(params, x):
        q, k, v = projections.qkv_projection(config, params, x)
        turn = lambda heads: projections.apply_rope(config, heads, positions)
        return turn(q), turn(k), v

    def by_products(params, x):
        turn = functools.partial(_rotated, config, x, positions)
        scale = 1.0
        if config.query_scale is not None:
            scale = config.query_scale * config.head_dim**0.5
        q = turn(params.query, params.query_bias) * scale
        k = turn(params.key, params.key_bias)
        return tuple(map(by_heads, (q, k, linear(x, params.value, params.value_bias))))

    # A norm before RoPE is not linear.
    if config.rope_theta is None or config.qk_norm != "none":
        return in_turn(params, x)
    return jax.lax.platform_dependent(params, x, tpu=by_products, default=in_turn)


def _rotated(config, x, positions, weight, bias):
    """Queries or keys with RoPE: a product for the channels, one for their partners."""
    heads, width = (weight.up if isinstance(weight, Adapted) else weight).shape[-2:]
    # The angles of all heads, by a product with ones: the cosines are taken once.
    pairs = np.tile(np.eye(width // 2, dtype=np.float32), 2 * heads)
    angles = rope.tables(width, positions, config.rope_theta, config.rope_scaling)
    cos, sin = (exact_product(table, pairs) for table in angles)
    if positions.ndim == 1:
        cos, sin = cos[None], sin[None]
    flat = lambda heads: heads.reshape(*heads.shape[:-2], -1)

    def products(channels):
        bent = jax.tree.map(lambda w: flat(channels(w)), bias)
        if not isinstance(weight, Adapted):
            return linear(x, flat(channels(weight)), bent)
        changed = weight._replace(
            weight=flat(channels(weight.weight)), up=flat(channels(weight.up))
        )
        return linear(x, changed, bent)

    own, partners = products(lambda w: w), products(_partners)
    # In float32 as the angles are, so that the result is rounded once.
    turned = own.astype(jnp.float32) * cos + partners.astype(jnp.float32) * sin
    return turned.astype(x.dtype).reshape(*x.shape[:-1], heads, width)


def _partners(weight):
    """Weights of channel i of a head in the place of its partner's, i ± K/2."""
    first, second = jnp.split(weight, 2, axis=-1)
    return jnp.concatenate([-second, first], axis=-1)
