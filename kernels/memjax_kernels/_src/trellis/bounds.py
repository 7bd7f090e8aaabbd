"""Steps bounded by the overlap of a token's key with the earlier keys of its chunk.

    gamma'_t = gamma_t Π_s (1 - gamma_s ⟨k_s, k_t⟩²)      s over the tokens before t

A memory whose gradients are all taken at the chunk's start corrects a key that repeats
too often; steps gamma' correct it once. Each pass has its own keys, which have unit
norm or are zeros; values are those of the second.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from memjax_kernels._src.trellis.state import TrellisTokens

#: A factor of the product, at least: with one of 0 the gradients of the others, the
#: product over the factor, would be lost. 1 minus a float32 is not nearer to 0.
LEAST = 2.0**-24


def bounded(
    k: Float[Array, "*B C K"], gamma: Float32[Array, "*B C"]
) -> Float32[Array, "*B C"]:
    """gamma' of a chunk."""
    k = k.astype(jnp.float32)
    alike = jnp.einsum("...tk,...sk->...ts", k, k) ** 2
    left = 1 - gamma[..., None, :] * jnp.tril(alike, -1)
    # Where nothing is left the factor is `LEAST`, with the gradient of `left`.
    nothing = LEAST + (left - jax.lax.stop_gradient(left))
    left = jnp.where(left > LEAST, left, nothing)
    # A product as a sum of logs, whose gradient is a product with ones.
    return gamma * jnp.exp(jnp.log(left).sum(axis=-1))


def bounded_tokens(x: TrellisTokens) -> TrellisTokens:
    """The tokens [*B, C, ...] of a chunk, the steps of both passes bounded."""
    return x._replace(
        key_gamma=bounded(x.k, x.key_gamma), value_gamma=bounded(x.v, x.value_gamma)
    )
