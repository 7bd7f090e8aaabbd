"""The short convolution and the gated norm by XLA.

Shapes: B batch, T time, H heads, K channels of a head, W width of the filters. The
channels of all heads are one axis inside (`norms` says why).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from memjax_kernels._src.recurrent_block.norms import flat, l2_normalize, rms_norm_heads


def short_convolution(
    x: Float[Array, "B T H K"],
    filters: Float[Array, "W H K"],
    before: Float[Array, "B _ H K"],
    positions: Int[Array, "B T"] | None,
    bias: Float[Array, "H K"] | None = None,
    *,
    activation: str = "silu",
    unit_norm: bool = True,
) -> Float[Array, "B T H K"]:
    """See `recurrent_block.short_convolution`, which checks the arguments."""
    width, time = filters.shape[0], x.shape[1]

    inputs = jnp.concatenate([flat(before).astype(x.dtype), flat(x)], axis=1)
    weights = flat(filters)

    def tap(w):
        seen, back = inputs[:, w : w + time].astype(jnp.float32), width - 1 - w
        if positions is not None and back:
            # Before the product: what another document has may be NaN.
            seen = jnp.where(positions[..., None] >= back, seen, 0.0)
        return seen * weights[w][None, None]

    convolved = functools.reduce(jnp.add, map(tap, range(width)))
    if bias is not None:
        convolved = convolved + flat(bias.astype(jnp.float32))[None, None]
    if activation == "silu":
        convolved = jax.nn.silu(convolved)
    y = convolved.reshape(x.shape)
    return (l2_normalize(y) if unit_norm else y).astype(x.dtype)


def last_inputs(
    before: Float[Array, "B _ *C"], x: Float[Array, "B T *C"]
) -> Float[Array, "B _ *C"]:
    """As many of the newest inputs as were before x, in the dtype of `before`."""
    few, time = before.shape[1], x.shape[1]

    # Channels are one axis in this slice, or XLA would copy all tokens to another
    # layout on a TPU.
    def joined(z):
        return z.reshape(*z.shape[:2], math.prod(z.shape[2:]))

    newest = joined(x)[:, max(0, time - few) :].astype(before.dtype)
    last = jnp.concatenate([joined(before), newest], axis=1)
    return last[:, last.shape[1] - few :].reshape(before.shape)


def gated_norm(
    y: Float[Array, "B T H K"],
    gate: Float[Array, "B T H K"],
    scale: Float[Array, "*H K"],
    *,
    epsilon: float,
    activation: str = "gelu",
    gate_first: bool = False,
    heads_per_norm: int = 1,
) -> Float[Array, "B T H K"]:
    """See `recurrent_block.gated_norm`, which checks the arguments."""

    # Products of half precision would round twice.
    opened = activate(activation, gate.astype(jnp.float32))
    if gate_first:
        y = y.astype(jnp.float32) * opened
    joined = y.reshape(*y.shape[:2], y.shape[2] // heads_per_norm, -1)
    if heads_per_norm > 1 and scale.ndim == 1:
        scale = jnp.tile(scale, heads_per_norm)
    normed = rms_norm_heads(joined, scale, epsilon)
    if not gate_first:
        normed = flat(normed) * flat(opened)
    return normed.astype(gate.dtype).reshape(y.shape)


def activate(activation: str, gate: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """GeLU (its tanh form), SiLU or the sigmoid of a gate."""
    return {"gelu": jax.nn.gelu, "silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}[
        activation
    ](gate)
