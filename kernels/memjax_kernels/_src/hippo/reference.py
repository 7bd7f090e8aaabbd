"""HiPPO one token at a time, in plain JAX: the definition."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from memjax_kernels._src.hippo import on_demand


def hippo_reference(
    features: Float[Array, "B n L X"],
    coefficients: Float[Array, "B N X"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    reconstruction: Float[Array, "M N"],
) -> tuple[Float[Array, "B N X"], Float[Array, "B n M X"]]:
    """c_t = (t/(t+1))^A c_{t-1} + B_t f_t (eq. 4); reads R c before each block."""
    length = features.shape[2]

    def absorb_token(carry, f):
        c, t = carry
        stop = t + 1
        moved = on_demand.advance(t, stop, c)
        written = on_demand.kernel(c.shape[1], t, stop, 1) * f[:, None]
        # Tokens of a block that is not full stay outside of the coefficients.
        inside = (t - start < count * length)[:, None, None]
        return (
            jnp.where(inside, moved + written, c),
            jnp.where(inside[:, 0, 0], stop, t),
        )

    def read_and_absorb(carry, f):
        memory = jnp.einsum("mn,bnx->bmx", reconstruction, carry[0])
        carry, _ = jax.lax.scan(lambda c, x: (absorb_token(c, x), None), carry, f)
        return carry, memory

    time_first = jnp.moveaxis(features, (1, 2), (0, 1))
    (coefficients, _), memory = jax.lax.scan(
        read_and_absorb, (coefficients, start), time_first
    )
    return coefficients, jnp.moveaxis(memory, 0, 1)
