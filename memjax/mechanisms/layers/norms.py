"""RMSNorm: Zhang & Sennrich (2019).

https://arxiv.org/abs/1910.07467
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common.cpu import scale_channels, scale_rows


def rms_norm(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], epsilon: float
) -> Float[Array, "*B D"]:
    """x / rms(x) * scale, in float32 inside."""
    high = x.astype(jnp.float32)
    mean = (high**2).mean(axis=-1, keepdims=True)
    high = scale_rows(high, jax.lax.rsqrt(mean + epsilon))
    return scale_channels(high, scale).astype(x.dtype)


def expand_leading_dims(small: Array, large: Array) -> Array:
    """`small` with leading axes of size 1, as many axes as `large`."""
    return small.reshape((1,) * (large.ndim - small.ndim) + small.shape)
