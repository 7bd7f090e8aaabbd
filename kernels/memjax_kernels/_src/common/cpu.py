"""CPU forms of products and broadcasts, and the choice of the token loop on a CPU.

XLA recomputes a broadcast operand for every element that uses it. The gradient of such
an operand, a sum over those elements, takes 5 to 20 times as long as the same sum
written as a matrix product (290 to 1,024 rows of 576, measured). A product with ones or
with the identity changes no bit and avoids both. And a loop over tokens whose memory
stays in the cache is faster than chunks, but not its gradient. Programs for other
devices, wherever they are compiled, have the plain form.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from memjax_kernels._src.common import partition

# Between memories of 1 MB, with which the token loop takes less than half as long as
# chunks, and of 8 MB, with which it is slower for some ops: experiments/speed.
LOOP_BYTES = 2 * 2**20

# A product with ones must change no bit, which needs the full float32 product.
exact_product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def by_platform(cpu: Callable, default: Callable) -> Callable:
    """`cpu` in a program for a CPU, `default` in one for any other device."""
    return lambda *arrays: jax.lax.platform_dependent(*arrays, cpu=cpu, default=default)


def weigh(
    x: Float[Array, "*B I"], weight: Float[Array, "I O"], dtype: DTypeLike | None = None
) -> Float[Array, "*B O"]:
    """x W, with sums and a result in `dtype`; None is that of x."""
    product = functools.partial(jnp.matmul, preferred_element_type=dtype)
    if x.ndim < 3 or _rows(x) == x.shape[:-1]:
        return product(x, weight)

    # The gradient of W sums over all axes but the last. Of two axes XLA makes one by a
    # transposed copy of what computes x, element by element: a quarter of a step.
    def rows_as_one(x, weight):
        y = product(x.reshape(*_rows(x), x.shape[-1]), weight)
        return y.reshape(*x.shape[:-1], weight.shape[1])

    return by_platform(rows_as_one, product)(x, weight)


def _rows(x: Float[Array, "*B D"]) -> tuple[int, ...]:
    """All axes but the last, as one where no other device has a part of them."""
    rows = x.shape[:-1]
    return rows if partition.devices_of(x) > 1 else (math.prod(rows),)


def scale_channels(
    x: Float[Array, "*B D"], scale: Float[Array, " D"]
) -> Float[Array, "*B D"]:
    """x * scale, one scale a channel."""
    return by_platform(
        lambda x, scale: (
            x
            * exact_product(jnp.ones((*_rows(x), 1), scale.dtype), scale[None]).reshape(
                x.shape
            )
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


def loop_is_faster(state: PyTree[Array]) -> bool:
    """Whether the memories of all batch elements stay in the cache of a CPU."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) <= LOOP_BYTES
