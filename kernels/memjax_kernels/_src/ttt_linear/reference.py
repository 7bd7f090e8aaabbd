"""TTT-linear one token at a time, in plain JAX: the definition.

The memory is a layer f(x) = x + LN(xᵀW + b), LN with learned scale and bias, trained on
the fly to map the key to the value:

    ℓ(W, b) = ½ |LN(kᵀW + b) - (v - k)|²        W ← W - η ∇_W ℓ        b ← b - η ∇_b ℓ

All gradients of a mini-batch of C tokens are taken at its start; the read of a token,
y = f(q), uses the layer after that token's own update. Sun et al. (2024),
https://arxiv.org/abs/2407.04620, eqs. 4 and 6, sections 2.4, 2.5 and 2.7. A state has
the layer at the mini-batch's start and the tokens since, whose updates a step adds.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common.arguments import check_gates, check_shapes
from memjax_kernels._src.common.steps import open_chunk, segment
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
    check_tokens(q, k, v, eta, ln_scale, ln_bias, "B H")
    like = functools.partial(ttt_linear_init_state, *v.shape, chunk_size)
    segment.check_state("state", state, like)
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


def check_tokens(
    q: Array,
    k: Array,
    v: Array,
    eta: Array,
    ln_scale: Array,
    ln_bias: Array,
    lead: str = "B T H",
) -> dict[str, int]:
    """The sizes B, T, H, K and V; `lead` has the first axes, those of a rate.

    Raises:
        ValueError: on shapes that do not fit, and known rates below 0.
    """
    sizes = check_shapes(
        q=(q, f"{lead} K"),
        k=(k, f"{lead} K"),
        v=(v, f"{lead} V"),
        eta=(eta, lead),
        ln_scale=(ln_scale, "H V"),
        ln_bias=(ln_bias, "H V"),
    )
    if sizes["K"] != sizes["V"]:
        raise ValueError(
            f"k and v must have one width, got K = {sizes['K']} and V = {sizes['V']}"
        )
    check_gates(eta=eta)
    return sizes
