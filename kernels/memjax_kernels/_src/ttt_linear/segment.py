"""Runs chunk implementations of TTT-linear: `common.steps.segment` says what these are.

They take chunks of q, k and v with the gate eta, and memories (W, b). LN has (scale,
bias) = `norm`, float32 [1, H, V] twice. A token of zeros does not train.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common.chunks import Chunks
from memjax_kernels._src.common.steps import segment
from memjax_kernels._src.ttt_linear.state import TTTLinearState, TTTLinearTokens


def in_chunks(
    implementation: Callable[..., tuple[tuple[Array, Array], Array]],
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
    """Runs an implementation; the arguments are those of `ttt_linear`."""
    norm = tuple(x.astype(jnp.float32)[None] for x in (ln_scale, ln_bias))
    # Open tokens are float32, and stay so.
    exact = state is not None and state.tokens is not None
    tokens = TTTLinearTokens(
        *(x.astype(jnp.float32) if exact else x for x in (k, v, eta))
    )
    q, x, *flags, position = segment.cut(q, tokens, state, reset, empty)
    before, given = state or empty, Chunks((q, x.k, x.v), (x.eta,), *flags)
    layers = ((layer.weights, layer.bias) for layer in (before, empty))
    (weights, bias), y = implementation(given, *layers, norm)
    memories, y = {"weights": weights, "bias": bias}, y.astype(v.dtype)
    return segment.join(before, x, y, v.shape[1], position, **memories)
