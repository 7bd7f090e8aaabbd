"""TTT-linear one token at a time, in plain JAX: the definition.

The memory is a layer f(x) = x + LN(xᵀW + b), LN with learned scale and bias, trained on
the fly to map the key to the value:

    ℓ(W, b) = ½ |LN(kᵀW + b) - (v - k)|²        W ← W - η ∇_W ℓ        b ← b - η ∇_b ℓ

All gradients of a mini-batch of C tokens are taken at its start; the read of a token,
y = f(q), uses the layer after that token's own update. Sun et al. (2024),
https://arxiv.org/abs/2407.04620, eqs. 4 and 6, sections 2.4, 2.5 and 2.7.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import one_pass
from memjax_kernels._src.common.arguments import check_shapes
from memjax_kernels._src.ttt_linear.state import TTTLinearState

EPSILON = 1e-6


def ttt_linear_step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    eta: Float[Array, "B H"],
    ln_scale: Float[Array, "H V"],
    ln_bias: Float[Array, "H V"],
    state: TTTLinearState,
    *,
    chunk_size: int = 16,
) -> tuple[TTTLinearState, Float[Array, "B H V"]]:
    """Trains on one token and reads with its query: in float32, y in v's dtype.

    Raises:
        ValueError: on a state of another chunk size, or arrays that do not fit.
    """
    check_chunk_size(chunk_size, state)
    check_shapes(v=(v, "B H V"), ln_scale=(ln_scale, "H V"), ln_bias=(ln_bias, "H V"))
    scale, shift = (jnp.broadcast_to(x, v.shape) for x in (ln_scale, ln_bias))
    return ttt_linear_batched_step(q, k, v, eta, scale, shift, state)


@one_pass.on_tpu
def ttt_linear_batched_step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    eta: Float[Array, "B H"],
    scale: Float[Array, "B H V"],
    shift: Float[Array, "B H V"],
    state: TTTLinearState,
) -> tuple[TTTLinearState, Float[Array, "B H V"]]:
    """`ttt_linear_step` with a layer norm for each batch element."""
    q, k, value, eta, scale, shift = (
        x.astype(jnp.float32) for x in (q, k, v, eta, scale, shift)
    )
    # The gradient is taken at the mini-batch's start, the read below at the memory now.
    hidden = jnp.einsum("bhk,bhkv->bhv", k, state.weights_start) + state.bias_start
    update = -eta[..., None] * loss_gradient(hidden, value - k, scale, shift)
    weights = state.weights + jnp.einsum("bhk,bhv->bhkv", k, update)
    bias = state.bias + update
    hidden = jnp.einsum("bhk,bhkv->bhv", q, weights) + bias
    y = (q + layer_norm(hidden, scale, shift)).astype(v.dtype)

    position = (state.position + 1) % state.chunk_size
    full = position == 0
    after = TTTLinearState(
        weights_start=jnp.where(
            full[:, None, None, None], weights, state.weights_start
        ),
        weights=weights,
        bias_start=jnp.where(full[:, None, None], bias, state.bias_start),
        bias=bias,
        position=position,
        chunk_size=state.chunk_size,
    )
    return after, y


def ttt_linear_reference(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    eta: Float[Array, "B T H"],
    ln_scale: Float[Array, "H V"],
    ln_bias: Float[Array, "H V"],
    state: TTTLinearState,
    reset: Bool[Array, "B T"] | None,
    empty: TTTLinearState,
) -> tuple[TTTLinearState, Float[Array, "B T H V"]]:
    """A loop of steps; a reset makes the memory `empty` before its token."""

    def reset_and_step(state, token):
        q, k, v, eta, reset = token
        if reset is not None:
            state = select(reset, empty, state)
        size = state.chunk_size
        return ttt_linear_step(q, k, v, eta, ln_scale, ln_bias, state, chunk_size=size)

    tokens = (q, k, v, eta, reset)
    after, y = jax.lax.scan(
        reset_and_step, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)
    )
    return after, jnp.moveaxis(y, 0, 1)


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


def select(
    elements: Bool[Array, " B"], chosen: TTTLinearState, other: TTTLinearState
) -> TTTLinearState:
    """The named batch elements of `chosen`, and the others of `other`."""

    def pick(a, b):
        return jnp.where(elements.reshape(-1, *[1] * (b.ndim - 1)), a, b)

    return jax.tree.map(pick, chosen, other)


def check_chunk_size(
    chunk_size: int, state: TTTLinearState, name: str = "state"
) -> None:
    """Raises ValueError unless the state is a `TTTLinearState` of this chunk size."""
    if not isinstance(state, TTTLinearState):
        raise ValueError(f"{name} must be a TTTLinearState, got {type(state).__name__}")
    if state.chunk_size != chunk_size:
        raise ValueError(
            f"{name} is of chunk_size={state.chunk_size}, got chunk_size={chunk_size}"
        )
