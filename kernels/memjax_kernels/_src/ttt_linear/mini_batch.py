"""The equations of a mini-batch: the dual form, of matrix products.

All gradients G of a mini-batch are taken at its start, so that its updates are one
product, and each read is a causal attention over the updates so far:

    G = ∇ℓ(K W + b)     Q W_t + b_t = Q W + b - (tril(Q Kᵀ + 1) ∘ η_j) G
    W ← W - Kᵀ (η G)    b ← b - Σ η G

Sun et al. (2024), https://arxiv.org/abs/2407.04620, section 2.5.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common.products import Multiply
from memjax_kernels._src.ttt_linear.state import TTTLinearTokens

EPSILON = 1e-6


class Layer(NamedTuple):
    """The layer in training, and the scale and shift of its LN."""

    weights: Float[Array, "*B K V"]
    bias: Float[Array, "*B V"]
    scale: Float[Array, "*#B V"]
    shift: Float[Array, "*#B V"]


def advance(
    q: Float[Array, "*B C K"], tokens: TTTLinearTokens, layer: Layer
) -> tuple[Layer, Float[Array, "*B C V"]]:
    """The layer after a mini-batch, and its reads."""
    update = _update(_product(tokens.k, layer.weights), tokens, layer)
    # The 1 is the bias's share: an update of b adds to every later read.
    overlap = jnp.tril(jnp.einsum("...ik,...jk->...ij", q, tokens.k) + 1.0)
    hidden = _product(q, layer.weights) + _product(overlap, update)
    written = jnp.einsum("...ck,...cv->...kv", tokens.k, update)
    return _add(update, written, layer), _read(q, hidden, layer)


def read(
    multiply: Multiply, q: Float[Array, "*B K"], tokens: TTTLinearTokens, layer: Layer
) -> Float[Array, "*B V"]:
    """The read of one query after all tokens of a mini-batch."""
    q = q[..., None, :]
    # One product, so that the weights are read once.
    rows = jnp.concatenate([tokens.k, q], axis=-2)
    hidden = multiply(rows, layer.weights, "nn")
    update = _update(hidden[..., :-1, :], tokens, layer)
    overlap = jnp.sum(tokens.k * q, axis=-1, keepdims=True) + 1.0
    hidden = hidden[..., -1:, :] + jnp.sum(overlap * update, axis=-2, keepdims=True)
    return _read(q, hidden, layer)[..., 0, :]


def write(multiply: Multiply, tokens: TTTLinearTokens, layer: Layer) -> Layer:
    """The layer after a mini-batch."""
    update = _update(multiply(tokens.k, layer.weights, "nn"), tokens, layer)
    written = multiply(tokens.k, update, "tn")
    return _add(update, written, layer)


def _product(rows, matrix):
    return jnp.einsum("...ck,...kv->...cv", rows, matrix)


def _add(update, written, layer):
    weights, bias = layer.weights + written, layer.bias + update.sum(axis=-2)
    return layer._replace(weights=weights, bias=bias)


def _update(hidden, tokens, layer):
    _, bias, *norm = (x[..., None, :] for x in layer)
    error = loss_gradient(hidden + bias, tokens.v - tokens.k, *norm)
    return -tokens.eta[..., None] * error


def _read(q, hidden, layer):
    _, bias, *norm = (x[..., None, :] for x in layer)
    return q + layer_norm(hidden + bias, *norm)


def layer_norm(
    x: Float[Array, "*B V"], scale: Float[Array, "*#B V"], bias: Float[Array, "*#B V"]
) -> Float[Array, "*B V"]:
    """(x - mean) / sqrt(variance + eps), scaled and shifted."""
    return _normalise(x)[0] * scale + bias


def loss_gradient(
    x: Float[Array, "*B V"],
    target: Float[Array, "*B V"],
    scale: Float[Array, "*#B V"],
    bias: Float[Array, "*#B V"],
) -> Float[Array, "*B V"]:
    """Gradient of ½ |LN(x) - target|² with respect to x."""
    normal, inverse = _normalise(x)
    error = (normal * scale + bias - target) * scale
    # A layer norm ignores shifts and scalings of x: its gradient has no part along
    # them.
    mean = error.mean(axis=-1, keepdims=True)
    along = (error * normal).mean(axis=-1, keepdims=True)
    return inverse * (error - mean - along * normal)


def _normalise(x):
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(variance + EPSILON)
    return centred * inverse, inverse
