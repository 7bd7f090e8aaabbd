"""The gated short convolution of LFM2: a memory of the last few tokens.

    y = W_o (c ∘ conv(b ∘ W_v x))        b = W_b x        c = W_c x

Liquid AI (2025), https://arxiv.org/abs/2511.23404. The convolution is causal
and depthwise, of three taps, without an activation.

Shapes: B batch, T time, D model, W width of the convolution.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from memjax.checks import check_sizes
from memjax.mechanisms.base import Mechanism, axes
from memjax.mechanisms.config import MechanismDefaults
from memjax.mechanisms.layers import documents
from memjax.mechanisms.layers.convolution import convolve, draw_filters, no_inputs
from memjax.mechanisms.layers.gates import draw_weight
from memjax.mechanisms.layers.projections import Weight, linear
from memjax.mechanisms.mixers import segments


@dataclasses.dataclass(frozen=True)
class ShortConvConfig(MechanismDefaults):
    """Sizes of a gated short convolution.

    Attributes:
        model_dim: D, width of the layer's input and output, and its channels.
        conv_width: W, taps of the convolution, at least 2.
    """

    name: ClassVar[str] = "short_conv"

    model_dim: int
    conv_width: int = 3

    def __post_init__(self):
        check_sizes(model_dim=self.model_dim)
        check_sizes(least=2, conv_width=self.conv_width)

    def build(self) -> Mechanism:
        """The mechanism of these sizes."""
        return segments.mechanism(self, init_params, init_state, step, read)

    def param_axes(self) -> "ShortConvParams":
        """Sharding axes of the parameters."""
        return ShortConvParams(
            input_gate=axes("model", "heads"),
            gate=axes("model", "heads"),
            value=axes("model", "heads"),
            filters=axes(None, "heads"),
            output=axes("heads", "model"),
        )


class ShortConvParams(NamedTuple):
    """Learned parameters."""

    input_gate: Float[Array, "D D"] | Weight  # W_b
    gate: Float[Array, "D D"] | Weight  # W_c
    value: Float[Array, "D D"] | Weight
    filters: Float[Array, "W D"]
    output: Float[Array, "D D"] | Weight

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Names of the matrices that LoRA may change."""
        return "input_gate", "gate", "value", "output"


class ShortConvState(NamedTuple):
    """The last W - 1 inputs of the convolution, float32."""

    window: Float[Array, "B _ D"]


def init_params(config: ShortConvConfig, key: PRNGKeyArray) -> ShortConvParams:
    """Draws the weights."""
    d, keys = config.model_dim, jax.random.split(key, 5)
    return ShortConvParams(
        input_gate=draw_weight(keys[0], d, d),
        gate=draw_weight(keys[1], d, d),
        value=draw_weight(keys[2], d, d),
        filters=draw_filters(keys[3], config.conv_width, d),
        output=draw_weight(keys[4], d, d),
    )


def init_state(config: ShortConvConfig, batch: int) -> ShortConvState:
    """A convolution without inputs."""
    return ShortConvState(no_inputs(batch, config.conv_width, config.model_dim))


def step(
    config: ShortConvConfig,
    params: ShortConvParams,
    state: ShortConvState,
    x: Float[Array, "B D"],
) -> tuple[ShortConvState, Float[Array, "B D"]]:
    """One token: a segment of one."""
    state, y = read(config, params, state, x[:, None])
    return state, y[:, 0]


def read(
    config: ShortConvConfig,
    params: ShortConvParams,
    state: ShortConvState,
    x: Float[Array, "B T D"],
    starts: Bool[Array, "B T"] | None = None,
) -> tuple[ShortConvState, Float[Array, "B T D"]]:
    """A segment: equal to T steps; see `segments.Read`."""
    positions = None if starts is None else documents.positions(starts)
    u = linear(x, params.input_gate) * linear(x, params.value)
    convolved = params.filters, None, state.window, positions
    window, u = convolve(u, *convolved, activation="none")
    return ShortConvState(window), linear(linear(x, params.gate) * u, params.output)
