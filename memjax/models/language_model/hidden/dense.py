"""Dense feed-forwards: two matrices around an activation, and a third for its gate.

Shapes: D model, F hidden.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from memjax.mechanisms.layers.projections import Adapted, linear, times
from memjax.models.language_model.config import BlockStyle, ModelConfig


class FeedForwardParams(NamedTuple):
    """SwiGLU or GEGLU, or two matrices around a ReLU or its square, without a gate."""

    gate: Float[Array, "D F"] | Adapted | None
    up: Float[Array, "D F"] | Adapted
    down: Float[Array, "F D"] | Adapted
    gate_bias: Float[Array, " F"] | None = None
    up_bias: Float[Array, " F"] | None = None
    down_bias: Float[Array, " D"] | None = None

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Names of the matrices that LoRA may change."""
        return "gate", "up", "down"


def init_feed_forward(
    config: ModelConfig, style: BlockStyle, keys: Key[Array, "3"]
) -> FeedForwardParams:
    """Draws the matrices from three keys, scaled by their fan-in; biases are 0."""
    gate_key, up_key, down_key = keys
    d, f = config.model_dim, style.hidden_dim or config.hidden_dim
    draw = jax.nn.initializers.lecun_normal()
    gated = style.feed_forward not in ("relu", "relu2")
    biased = config.architecture.feed_forward_bias
    return FeedForwardParams(
        gate=draw(gate_key, (d, f)) if gated else None,
        up=draw(up_key, (d, f)),
        down=draw(down_key, (f, d)),
        gate_bias=jnp.zeros(f) if gated and biased else None,
        up_bias=jnp.zeros(f) if biased else None,
        down_bias=jnp.zeros(d) if biased else None,
    )


def feed_forward(
    config: ModelConfig,
    style: BlockStyle,
    params: FeedForwardParams,
    x: Float[Array, "*B D"],
    product: Callable[..., Array] = linear,
) -> Float[Array, "*B D"]:
    """W_down (f(W_gate x) ∘ W_up x), or W_down f(W_up x) without a gate.

    Args:
        config: of the model.
        style: of the layer.
        params: the matrices and biases.
        x: tokens.
        product: of tokens, a matrix and its bias; `experts` has one matrix for some
            tokens and another for others.
    """
    of_gate, of_output = config.architecture.feed_forward_multipliers
    up = product(x, params.up, params.up_bias)
    if params.gate is None:
        hidden = jax.nn.relu(up)
        hidden = hidden**2 if style.feed_forward == "relu2" else hidden
    else:
        gate = times(product(x, params.gate, params.gate_bias), of_gate)
        gelu = style.feed_forward == "geglu"
        hidden = (jax.nn.gelu(gate) if gelu else jax.nn.silu(gate)) * up
    return times(product(hidden, params.down, params.down_bias), of_output)
