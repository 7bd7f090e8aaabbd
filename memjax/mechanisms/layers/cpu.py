"""Values of a row, a channel or a position that many numbers share, quickly on a CPU.

XLA's CPU compiler computes such a value again for each number that uses it, and sums
its gradient, a sum of products, 5 to 20 times as slowly as the same sum written as a
product of matrices (290 to 1,024 rows of 576, measured). A product with ones or with
the identity changes no bit and keeps the compiler from both. Other devices get the
plain form.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax.mechanisms.base import lead

_product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def scale_channels(
    x: Float[Array, "*B D"], scale: Float[Array, " D"]
) -> Float[Array, "*B D"]:
    """x * scale, one scale a channel."""
    if jax.default_backend() != "cpu":
        return x * lead(scale, x)
    return x * _product(jnp.ones((*x.shape[:-1], 1), scale.dtype), scale[None])


def scale_rows(
    x: Float[Array, "*B D"], scale: Float[Array, "*B 1"]
) -> Float[Array, "*B D"]:
    """x * scale, one scale a row."""
    if jax.default_backend() != "cpu":
        return x * scale
    return x * _product(scale, jnp.ones((1, x.shape[-1]), scale.dtype))


def computed_once(x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """x, finite and costly to compute, that a broadcast follows."""
    if jax.default_backend() != "cpu":
        return x
    return _product(x, jnp.eye(x.shape[-1], dtype=x.dtype))
