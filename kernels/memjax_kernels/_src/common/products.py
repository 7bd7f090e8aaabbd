"""Batched products of matrices, for XLA and inside Pallas kernels."""

import functools
from typing import Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common.varying import vary_alike

Form = Literal["nt", "nn", "tn"]

# Contracted axes of the products x y^T, x y and x^T y.
_CONTRACTED = {"nt": (-1, -1), "nn": (-1, -2), "tn": (-2, -2)}


@runtime_checkable
class Multiply(Protocol):
    """x y^T ("nt"), x y ("nn") or x^T y ("tn") of the last two axes, in float32."""

    def __call__(self, x: Array, y: Array, form: Form, /) -> Array: ...


def multiply(
    x: Float[Array, "*B _ _"], y: Float[Array, "*B _ _"], form: Form, dtype: jnp.dtype
) -> Float[Array, "*B _ _"]:
    """One product with operands rounded to `dtype` and sums in float32."""
    batch = tuple(range(x.ndim - 2))
    left, right = _CONTRACTED[form]
    # Without this a TPU would round float32 operands to bfloat16.
    exact = dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        x.astype(dtype),
        y.astype(dtype),
        (((x.ndim + left,), (y.ndim + right,)), (batch, batch)),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


#: In float32. Unlike a `multiplier` it has forward mode.
EXACT = functools.partial(multiply, dtype=jnp.dtype(jnp.float32))


# One function a dtype, so that jax traces and compiles it once.
@functools.cache
def multiplier(dtype: jnp.dtype) -> Multiply:
    """`multiply` in `dtype`, with gradients in `dtype` that need no transposes."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
    def product(x, y, form):
        return multiply(x, y, form, dtype)

    def backward(form, operands, ct):
        x, y = operands
        match form:
            case "nt":
                dx = multiply(ct, y, "nn", dtype)
                dy = multiply(ct, x, "tn", dtype)
            case "nn":
                dx = multiply(ct, y, "nt", dtype)
                dy = multiply(x, ct, "tn", dtype)
            case _:
                dx = multiply(y, ct, "nt", dtype)
                dy = multiply(x, ct, "nn", dtype)
        # The operands' own dtypes, as a gradient must have.
        return dx.astype(x.dtype), dy.astype(y.dtype)

    product.defvjp(lambda x, y, form: (product(x, y, form), (x, y)), backward)
    return lambda x, y, form: product(*vary_alike((x, y)), form)


def operand_dtype(*tokens: Array | None) -> jnp.dtype:
    """bfloat16 where all tokens are, else float32."""
    given = {x.dtype for x in tokens if x is not None}
    return jnp.dtype(
        jnp.bfloat16 if given == {jnp.dtype(jnp.bfloat16)} else jnp.float32
    )
