"""The overlap of keys by XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def in_chunks(
    k: Float[Array, "B n C H K"], gamma: Float32[Array, "B n C H"]
) -> Float32[Array, "B n C H"]:
    """`overlap` of tokens in chunks."""
    k = k.astype(jnp.float32)
    alike = jnp.einsum("bnthk,bnshk->bnhts", k, k) ** 2
    of_earlier = jnp.moveaxis(gamma, -1, -2)[..., None, :] * jnp.tril(alike, -1)
    left = 1 - of_earlier
    # Where nothing is left the factor is `LEAST`, with the gradient of `left`.
    nothing = LEAST + (left - jax.lax.stop_gradient(left))
    left = jnp.where(left > LEAST, left, nothing)
    # A product as a sum of logs, whose gradient is a product with ones.
    left = jnp.exp(jnp.log(left).sum(axis=-1))
    return jnp.moveaxis(left, -1, -2)


#: A factor of the product, at least: with one of 0 the gradients of the others, the
#: product over the factor, would be lost. 1 minus a float32 is not nearer to 0.
LEAST = 2.0**-24
