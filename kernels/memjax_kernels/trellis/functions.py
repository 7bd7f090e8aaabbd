"""The elementwise and normalising functions of Trellis, over the slots (last axis).

phi bends what a memory predicts before it is compared with the target; the activation
f stands between the two passes. Everything is float32, closed form, and free of what a
Mosaic TPU kernel lacks, so that the kernels call these very functions.

    silu(z) = z sigmoid(z)
    l2_silu(z) = silu(z) / sqrt(|silu(z)|^2 + eps)
    ln_silu(z) = (silu(z) - mean) / sqrt(var + eps), no affine

with eps = 1e-6, in the gradients too. Karami et al., "Trellis", section 3.2, Table 2.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Phi = Literal["identity", "silu", "l2_silu", "ln_silu", "softmax"]
Activation = Literal["ln_silu", "l2_silu", "softmax"]
PHIS: tuple[str, ...] = get_args(Phi)
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
EPS = 1e-6


def apply(name: str, z: Float[Array, "*B M"]) -> Float[Array, "*B M"]:
    """The function called `name`, one of `PHIS`."""
    match name:
        case "identity":
            return z
        case "silu":
            return _silu(z)[0]
        case "l2_silu":
            return _l2(_silu(z)[0])[0]
        case "ln_silu":
            return _layer_norm(_silu(z)[0])[0]
        case "softmax":
            return _softmax(z)
    raise ValueError(f"function must be one of {PHIS}, got {name!r}")


def error_gradient(
    phi: str, z: Float[Array, "*B M"], target: Float[Array, "*B M"]
) -> Float[Array, "*B M"]:
    """u = J_phi(z)^T (phi(z) - target): half the gradient of |phi(z) - target|^2."""
    if phi == "identity":
        return z - target
    if phi == "softmax":
        p = _softmax(z)
        error = p - target
        return p * (error - jnp.sum(p * error, axis=-1, keepdims=True))
    s, slope = _silu(z)
    if phi == "silu":
        return (s - target) * slope
    if phi == "l2_silu":
        n, scale = _l2(s)
        error = n - target
        error = error - n * jnp.sum(n * error, axis=-1, keepdims=True)
    elif phi == "ln_silu":
        n, scale = _layer_norm(s)
        error = n - target
        along = jnp.mean(n * error, axis=-1, keepdims=True)
        error = error - jnp.mean(error, axis=-1, keepdims=True) - n * along
    else:
        raise ValueError(f"phi must be one of {PHIS}, got {phi!r}")
    return error * scale * slope


def _silu(z):
    """silu(z) and its derivative."""
    gate = jax.lax.logistic(z)
    return z * gate, gate * (1 + z * (1 - gate))


def _l2(s):
    """s by its norm, and one over the norm."""
    scale = jax.lax.rsqrt(jnp.sum(s * s, axis=-1, keepdims=True) + EPS)
    return s * scale, scale


def _layer_norm(s):
    """s less its mean by its deviation, and one over the deviation."""
    centred = s - jnp.mean(s, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(variance + EPS)
    return centred * scale, scale


def _softmax(z):
    highest = jax.lax.stop_gradient(jnp.max(z, axis=-1, keepdims=True))
    weights = jnp.exp(z - highest)
    return weights / jnp.sum(weights, axis=-1, keepdims=True)
