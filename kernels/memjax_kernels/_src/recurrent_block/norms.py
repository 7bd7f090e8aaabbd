"""Norms of heads, in XLA.

Sums over the channels of a head, and factors of heads, are products with zeros and
ones over all channels of a token: separate axes for heads and channels would
need another layout on a TPU, where two heads of 64 fill the lanes of a register.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from memjax_kernels._src.common.cpu import exact_product, scale_channels

#: Under the root of a norm: a vector of zeros has a finite gradient and stays zero.
LEAST_SQUARES = 1e-6


def l2_normalize(
    x: Float[Array, "*B H K"], norm: float = 1.0
) -> Float[Array, "*B H K"]:
    """Each head scaled to a norm, in float32 inside; zeros stay zeros."""
    high = x.astype(jnp.float32)
    squares = _head_squares(high) + LEAST_SQUARES
    return _divide_by_root(high, squares, norm).astype(x.dtype)


def rms_norm_heads(
    x: Float[Array, "*B H V"], scale: Float[Array, "..."], epsilon: float
) -> Float32[Array, "*B H V"]:
    """Each head divided by its rms, times a scale, which heads may share; float32.

    Scales are [V] or [H, V]. Heads may be joined in x and apart in the scale.
    """
    high = x.astype(jnp.float32)
    high = _divide_by_root(high, _head_squares(high) / x.shape[-1] + epsilon)
    flat_scale = scale.astype(jnp.float32).reshape(-1)
    every_head = jnp.tile(flat_scale, x.shape[-2] * x.shape[-1] // flat_scale.size)
    return scale_channels(flat(high), every_head).reshape(x.shape)


def _head_squares(x):
    """The sum of squares of each head, [*B, H]."""
    return exact_product(flat(x) ** 2, _of_head(x))


def _divide_by_root(x, squares, norm=1.0):
    """x [*B, H, K] times `norm` over the roots of `squares` [*B, H]."""
    factors = exact_product(norm * jax.lax.rsqrt(squares), _of_head(x).T)
    return (flat(x) * factors).reshape(x.shape)


def flat(x: Float[Array, "*B H K"]) -> Float[Array, "*B HK"]:
    """The channels of all heads as one axis."""
    # Not -1: before one tap there are no tokens, and -1 of nothing is any size.
    return x.reshape(*x.shape[:-2], math.prod(x.shape[-2:]))


def _of_head(x):
    """1 where a channel is of a head, [H K, H]."""
    heads, width = x.shape[-2:]
    return np.repeat(np.eye(heads, dtype=np.float32), width, axis=0)
