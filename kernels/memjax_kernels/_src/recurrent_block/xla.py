"""The short convolution and the gated norm by XLA.

Shapes: B batch, T time, H heads, K channels of a head, W width of the filters. The
channels of all heads are one axis inside (`norms` says why).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from memjax_kernels._src.recurrent_block.norms import l2_normalize, rms_norm_heads


def short_convolution(
    x: Float[Array, "B T H K"],
    filters: Float[Array, "W H K"],
    before: Float[Array, "B _ H K"],
    positions: Int[Array, "B T"] | None,
) -> Float[Array, "B T H K"]:
    """See `recurrent_block.short_convolution`, which checks the arguments."""
    width, time = filters.shape[0], x.shape[1]

    def flat(z):
        # Not -1: before one tap there are no tokens, and -1 of nothing is any size.
        return z.reshape(*z.shape[:-2], math.prod(z.shape[-2:]))

    inputs = jnp.concatenate([flat(before).astype(x.dtype), flat(x)], axis=1)
    weights = flat(filters)

    def tap(w):
        product = inputs[:, w : w + time].astype(jnp.float32) * weights[w][None, None]
        back = width - 1 - w
        if positions is None or not back:
            return product
        return jnp.where(positions[..., None] >= back, product, 0.0)

    convolved = functools.reduce(jnp.add, map(tap, range(width)))
    return l2_normalize(jax.nn.silu(convolved).reshape(x.shape)).astype(x.dtype)


def gated_norm(
    y: Float[Array, "B T H K"],
    gate: Float[Array, "B T H K"],
    scale: Float[Array, " K"],
    *,
    epsilon: float,
) -> Float[Array, "B T H K"]:
    """See `recurrent_block.gated_norm`, which checks the arguments."""
    normed = rms_norm_heads(y, scale, epsilon).astype(gate.dtype)

    def flat(z):
        return z.reshape(*z.shape[:-2], -1)

    return (flat(normed) * jax.nn.gelu(flat(gate))).reshape(y.shape)
