"""TTT-linear one token at a time, in plain JAX: the definition.

The memory is a layer f(x) = x + LN(xᵀW + b), LN with learned scale and bias, trained on
the fly to map the key to the value:

    ℓ(W, b) = ½ |LN(kᵀW + b) - (v - k)|²        W ← W - η ∇_W ℓ        b ← b - η ∇_b ℓ

All gradients of a mini-batch of C tokens are taken at its start; the read of a token,
y = f(q), uses the layer after that token's own update. Sun et al. (2024),
https://arxiv.org/abs/2407.04620, eqs. 4 and 6, sections 2.4, 2.5 and 2.7. A state has
the layer at the mini-batch's start and the tokens since, whose updates a step adds.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common.arguments import check_gates, check_shapes
from memjax_kernels._src.common.steps import open_chunk
from memjax_kernels._src.ttt_linear import mini_batch
from memjax_kernels._src.ttt_linear.state import (
    TTTLinearState,
    TTTLinearTokens,
    ttt_linear_init_state,
)


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
    check_shapes(
        q=(q, "B H K"),
        k=(k, "B H K"),
        v=(v, "B H V"),
        eta=(eta, "B H"),
        ln_scale=(ln_scale, "H V"),
        ln_bias=(ln_bias, "H V"),
    )
    check_gates(eta=eta)
    check_state("state", state, v.shape, chunk_size, chunk_size - 1)
    scale, shift = (
        jnp.broadcast_to(x.astype(jnp.float32), v.shape) for x in (ln_scale, ln_bias)
    )
    layer = mini_batch.Layer(state.weights, state.bias, scale, shift)
    (layer, tokens, position), y = open_chunk.step(
        mini_batch.read,
        mini_batch.write,
        q,
        TTTLinearTokens(k, v, eta),
        (layer, state.tokens, state.position),
    )
    after = TTTLinearState(layer.weights, layer.bias, tokens, position, chunk_size)
    return after, y.astype(v.dtype)


def ttt_linear_reference(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    eta: Float[Array, "B T H"],
    ln_scale: Float[Array, "H V"],
    ln_bias: Float[Array, "H V"],
    state: TTTLinearState | None,
    reset: Bool[Array, "B T"] | None,
    empty: TTTLinearState,
) -> tuple[TTTLinearState, Float[Array, "B T H V"]]:
    """A loop of steps; a reset makes the memory `empty` before its token."""
    size = empty.chunk_size

    def reset_and_step(state, token):
        q, k, v, eta, reset = token
        if reset is not None:
            state = open_chunk.replace(reset, empty, state)
        return ttt_linear_step(q, k, v, eta, ln_scale, ln_bias, state, chunk_size=size)

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, eta, reset))
    start = empty if state is None else state
    after, y = jax.lax.scan(reset_and_step, start, tokens)
    return after, jnp.moveaxis(y, 0, 1)


def check_state(
    name: str, state: TTTLinearState, shape: tuple[int, ...], chunk_size: int, last: int
) -> None:
    """Raises ValueError unless a state fits values of a shape [B, ..., H, V]."""
    batch, heads, width = shape[0], *shape[-2:]
    like = jax.eval_shape(
        lambda: ttt_linear_init_state(batch, heads, width, chunk_size)
    )
    open_chunk.check_state(name, state, like, last)
