"""Token counter that saturates instead of overflowing."""

import jax.numpy as jnp
from jaxtyping import Array, Int

#: Largest count: one more segment still fits into int32.
LAST = 2**30


def advanced(length: Int[Array, "*B"], tokens: Int[Array, "*N"] | int) -> Array:
    """`length + tokens`, but at most `LAST`.

    An int32 count would become negative after 2**31 tokens, and a memory that divides
    by it NaN.
    """
    return jnp.minimum(length + tokens, LAST).astype(length.dtype)
