"""CPU workaround: XLA recomputes a broadcast operand for every element that uses it.

The gradient of such an operand, a sum over those elements, takes 5 to 20 times as long
as the same sum written as a matrix product (290 to 1,024 rows of 576, measured). A
product with ones or with the identity changes no bit and avoids both. Programs for
other devices, wherever they are compiled, have the plain form.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# A product with ones must change no bit, which needs the full float32 product.
exact_product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def by_platform(cpu: Callable, default: Callable) -> Callable:
    """`cpu` in a program for a CPU, `default` in one for any other device."""
    return lambda *arrays: jax.lax.platform_dependent(*arrays, cpu=cpu, default=default)


def scale_channels(
    x: Float[Array, "*B D"], scale: Float[Array, " D"]
) -> Float[Array, "*B D"]:
    """x * scale, one scale a channel."""
    return by_platform(
        lambda x, scale: (
            x * exact_product(jnp.ones((*x.shape[:-1], 1), scale.dtype), scale[None])
        ),
        lambda x, scale: x * scale.reshape((1,) * (x.ndim - 1) + (-1,)),
    )(x, scale)


def scale_rows(
    x: Float[Array, "*B D"], scale: Float[Array, "*B 1"]
) -> Float[Array, "*B D"]:
    """x * scale, one scale a row."""
    return by_platform(
        lambda x, scale: (
            x * exact_product(scale, jnp.ones((1, x.shape[-1]), scale.dtype))
        ),
        lambda x, scale: x * scale,
    )(x, scale)


def computed_once(x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """x, finite and costly to compute, that a broadcast follows."""
    return by_platform(
        lambda x: exact_product(x, jnp.eye(x.shape[-1], dtype=x.dtype)), lambda x: x
    )(x)
