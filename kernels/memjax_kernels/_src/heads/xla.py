"""RoPE by XLA."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common.cpu import computed_once


def rotate(
    x: Float[Array, "*B T H K"],
    cos: Float[Array, "*P T half"],
    sin: Float[Array, "*P T half"],
) -> Float[Array, "*B T H K"]:
    """See `heads.rotate`, which checks the arguments."""

    def of_heads(table):
        table = computed_once(table)[..., None, :]
        return table.reshape((1,) * (x.ndim - table.ndim) + table.shape)

    cos, sin = of_heads(cos), of_heads(sin)
    # In float32 as the angles are, so that the result is rounded once.
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
