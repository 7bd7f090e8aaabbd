"""The functions of Trellis over the slots (last axis), and gradients through them.

phi is applied to a memory's prediction before its comparison with the target; the
activation f is between the two passes. All are float32, in closed form, of operations
that a TPU kernel has, so that the kernels call these functions. GPU
kernels pass their own reduction, `over`.

    silu(z) = z sigmoid(z)
    l2_silu(z) = silu(z) / sqrt(|silu(z)|^2 + eps)
    ln_silu(z) = (silu(z) - mean) / sqrt(var + eps), no affine

with eps = 1e-6, in the gradients too. Karami et al., "Trellis", section 3.2, Table 2.

Steps are bounded by the overlap of a token's key with the earlier keys of its chunk:

    gamma'_t = gamma_t Π_s (1 - gamma_s ⟨k_s, k_t⟩²)      s over the tokens before t

A memory whose gradients are all taken at the chunk's start corrects a key that repeats
too often; steps gamma' correct it once. Each pass has its own keys, which have unit
norm or are zeros; values are those of the second.
"""

from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from memjax_kernels._src.common.products import EXACT, Multiply

TrellisPhi = Literal["identity", "silu", "l2_silu", "ln_silu", "softmax"]
TrellisActivation = Literal["ln_silu", "l2_silu", "softmax"]
TRELLIS_PHIS: tuple[str, ...] = get_args(TrellisPhi)
TRELLIS_ACTIVATIONS: tuple[str, ...] = get_args(TrellisActivation)
EPS = 1e-6
#: A factor of the product, at least: with one of 0 the gradients of the others, the
#: product over the factor, would be lost. 1 minus a float32 is not nearer to 0.
LEAST = 2.0**-24
# (jnp.sum, jnp.mean or jnp.max, x) -> its reduction over the slots, to compute with x.
Over = Callable[[Callable[..., Array], Array], Array]
Sigmoid = Callable[[Array], Array]


def keep_axis(reduce: Callable[..., Array], x: Array) -> Array:
    """The `Over` of plain JAX."""
    return reduce(x, axis=-1, keepdims=True)


def apply(
    name: str,
    z: Float[Array, "*B M"],
    over: Over = keep_axis,
    sigmoid: Sigmoid = jax.lax.logistic,
) -> Float[Array, "*B M"]:
    """The function called `name`, one of `TRELLIS_PHIS`; a TPU has its own sigmoid."""
    match name:
        case "identity":
            return z
        case "silu":
            return _silu(z, sigmoid)[0]
        case "l2_silu":
            return _l2(_silu(z, sigmoid)[0], over)[0]
        case "ln_silu":
            return _layer_norm(_silu(z, sigmoid)[0], over)[0]
        case "softmax":
            return _softmax(z, over)
    raise ValueError(f"function must be one of {TRELLIS_PHIS}, got {name!r}")


def error_gradient(
    phi: str,
    z: Float[Array, "*B M"],
    target: Float[Array, "*B M"],
    over: Over = keep_axis,
    sigmoid: Sigmoid = jax.lax.logistic,
) -> Float[Array, "*B M"]:
    """u = J_phi(z)^T (phi(z) - target): half the gradient of |phi(z) - target|^2."""
    if phi == "identity":
        return z - target
    if phi == "softmax":
        p = _softmax(z, over)
        error = p - target
        # The Jacobian of a softmax, diag(p) - p pᵀ, without forming it.
        return p * (error - over(jnp.sum, p * error))
    s, slope = _silu(z, sigmoid)
    if phi == "silu":
        return (s - target) * slope
    if phi == "l2_silu":
        n, scale = _l2(s, over)
        error = n - target
        # The Jacobian of s / |s| removes the part along s, which does not change it.
        error = error - n * over(jnp.sum, n * error)
    elif phi == "ln_silu":
        n, scale = _layer_norm(s, over)
        error = n - target
        along = _mean(n * error, over)
        # Likewise: a layer norm ignores shifts and scalings of s.
        error = error - _mean(error, over) - n * along
    else:
        raise ValueError(f"phi must be one of {TRELLIS_PHIS}, got {phi!r}")
    return error * scale * slope


def _mean(x, over):
    return over(jnp.mean, x)


def _silu(z, sigmoid):
    """silu(z) and its derivative."""
    gate = sigmoid(z)
    return z * gate, gate * (1 + z * (1 - gate))


def _l2(s, over):
    """s by its norm, and one over the norm."""
    scale = jax.lax.rsqrt(over(jnp.sum, s * s) + EPS)
    return s * scale, scale


def _layer_norm(s, over):
    """s less its mean by its deviation, and one over the deviation."""
    centred = s - _mean(s, over)
    variance = _mean(centred * centred, over)
    scale = jax.lax.rsqrt(variance + EPS)
    return centred * scale, scale


def _softmax(z, over):
    # Any shift near the largest does. The derivative of `round` is zero, as is that of
    # `stop_gradient`, which GPU kernels lack.
    whole = jax.lax.round(z, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    highest = over(jnp.max, whole)
    weights = jnp.exp(z - highest)
    return weights / over(jnp.sum, weights)


def bounded(
    k: Float[Array, "*B C K"], gamma: Float32[Array, "*B C"], multiply: Multiply = EXACT
) -> Float32[Array, "*B C"]:
    """gamma' of a chunk."""
    k = k.astype(jnp.float32)
    alike = multiply(k, k, "nt") ** 2
    left = 1 - gamma[..., None, :] * jnp.tril(alike, -1)
    # Where nothing is left the factor is `LEAST`, with the gradient of `left`.
    nothing = LEAST + (left - jax.lax.stop_gradient(left))
    left = jnp.where(left > LEAST, left, nothing)
    # A product as a sum of logs, whose gradient is a product with ones.
    return gamma * jnp.exp(jnp.log(left).sum(axis=-1))
