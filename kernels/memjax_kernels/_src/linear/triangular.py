"""Inverses of unit lower-triangular matrices, by recursion on their halves."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_EXACT = jax.lax.Precision.HIGHEST


@jax.custom_jvp
def inverse(lower: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    """(I + L)⁻¹ in products of halves; C is a power of two.

    It is as stable as substitution, but works in large products. A sum of powers of L
    would cancel catastrophically where the entries of L do not decay.

    Args:
        lower: L, zero on the diagonal and above.
    """
    half = lower.shape[-1] // 2
    if half == 0:
        return jnp.ones_like(lower)
    late = lower[..., half:, :]
    # Both diagonal blocks in one call: half as many calls, twice as large products.
    both = jnp.stack([lower[..., :half, :half], late[..., half:]], axis=-3)
    both = inverse(both)
    first, second = both[..., 0, :, :], both[..., 1, :, :]
    corner = _product(_product(-second, late[..., :half]), first)
    top = jnp.concatenate([first, jnp.zeros_like(corner)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)


@inverse.defjvp
def _inverse_jvp(primals, tangents):
    """d(I + L)⁻¹ = -(I + L)⁻¹ dL (I + L)⁻¹: two products, no recursion."""
    (lower,), (tangent,) = primals, tangents
    result = inverse(lower)
    return result, -_product(_product(result, jnp.tril(tangent, -1)), result)


def _product(x, y):
    if x.shape[-1] <= 4:  # Below the size at which a call for each product pays.
        return (x[..., :, :, None] * y[..., None, :, :]).sum(axis=-2)
    return jnp.matmul(x, y, precision=_EXACT)
