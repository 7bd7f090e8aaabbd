"""RG-LRU: a gated linear recurrence of each channel, and the block around it.

    u = conv(W_x x + b_x) + b        i = σ(block-diagonal(u))        r likewise
    log a_t = -8 r_t softplus(Λ)        h_t = a_t h_{t-1} + √(1 - a_t²) i_t u_t
    out = W_o (h ∘ GeLU(W_y x + b_y)) + b_o

De et al. (2024), https://arxiv.org/abs/2402.19427, section 2.4, as RecurrentGemma has
it: Botev et al. (2024), https://arxiv.org/abs/2404.07839. The first token of a text is
not scaled: the factor is 1 instead of √(1 - a²). The factor's gradient is at most 1,000
times its argument's, in their programs too. Λ starts with exp(-softplus(Λ))² uniform
between 0.9² and 0.999².

Shapes: B batch, T time, D model, C channels, G blocks of the gates, K channels of a
block, W width of the convolution.
"""

import dataclasses
from typing import ClassVar, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from memjax.checks import check_sizes, require_known
from memjax.mechanisms.base import Mechanism, axes
from memjax.mechanisms.config import MechanismDefaults
from memjax.mechanisms.layers import documents
from memjax.mechanisms.layers.convolution import convolve, draw_filters, no_inputs
from memjax.mechanisms.layers.gates import draw_weight
from memjax.mechanisms.layers.projections import Weight, linear
from memjax.mechanisms.layers.recurrent.style import Implementation
from memjax.mechanisms.mixers import segments
from memjax_kernels import gated_scan, gated_scan_init_state, gated_scan_step

#: c of the paper: the sharpest decay is exp(-c softplus(Λ)).
SHARPNESS = 8.0
#: Largest gradient of the root.
STEEPEST = 1000.0


@dataclasses.dataclass(frozen=True)
class RGLRUConfig(MechanismDefaults):
    """Sizes of a recurrent block of RecurrentGemma.

    Attributes:
        model_dim: D, width of the layer's input and output.
        width: C, channels of the recurrence.
        num_blocks: G, blocks of the gates' matrices; it divides `width`.
        conv_width: W, taps of the convolution, at least 2.
        implementation: of a segment, with equal results; None is the fastest.
    """

    name: ClassVar[str] = "rg_lru"

    model_dim: int
    width: int
    num_blocks: int
    conv_width: int = 4
    implementation: Implementation | None = None

    def __post_init__(self):
        check_sizes(
            model_dim=self.model_dim,
            width=self.width,
            num_blocks=self.num_blocks,
        )
        check_sizes(least=2, conv_width=self.conv_width)
        if self.width % self.num_blocks:
            raise ValueError(
                f"num_blocks must divide width={self.width}, got {self.num_blocks}"
            )
        known = (None, *get_args(Implementation))
        require_known("implementation", self.implementation, known)

    def build(self) -> Mechanism:
        """The mechanism of these sizes."""
        return segments.mechanism(self, init_params, init_state, step, read)

    def param_axes(self) -> "RGLRUParams":
        """Sharding axes of the parameters."""
        return RGLRUParams(
            value=axes("model", "heads"),
            value_bias=axes(),
            gate=axes("model", "heads"),
            gate_bias=axes(),
            filters=axes(None, "heads"),
            filter_bias=axes(),
            input_gate=axes("heads"),
            input_bias=axes(),
            recurrent_gate=axes("heads"),
            recurrent_bias=axes(),
            decay=axes(),
            output=axes("heads", "model"),
            output_bias=axes(),
        )


class RGLRUParams(NamedTuple):
    """Learned parameters."""

    value: Float[Array, "D C"] | Weight  # W_x
    value_bias: Float[Array, " C"]
    gate: Float[Array, "D C"] | Weight  # W_y
    gate_bias: Float[Array, " C"]
    filters: Float[Array, "W C"]
    filter_bias: Float[Array, " C"]
    input_gate: Float[Array, "G K K"]
    input_bias: Float[Array, "G K"]
    recurrent_gate: Float[Array, "G K K"]
    recurrent_bias: Float[Array, "G K"]
    decay: Float[Array, " C"]  # Λ
    output: Float[Array, "C D"] | Weight
    output_bias: Float[Array, " D"]

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Names of the matrices that LoRA may change."""
        return "value", "gate", "output"


class RGLRUState(NamedTuple):
    """The memory, the last inputs of the convolution, and texts not begun yet."""

    window: Float[Array, "B _ C"]
    memory: Float[Array, "B C"]
    empty: Bool[Array, " B"]


def init_params(config: RGLRUConfig, key: PRNGKeyArray) -> RGLRUParams:
    """Draws the weights; biases start at 0."""
    d, c, g = config.model_dim, config.width, config.num_blocks
    keys = jax.random.split(key, 7)
    squares = jax.random.uniform(keys[5], (c,), minval=0.9**2, maxval=0.999**2)
    return RGLRUParams(
        value=draw_weight(keys[0], d, c),
        value_bias=jnp.zeros(c),
        gate=draw_weight(keys[1], d, c),
        gate_bias=jnp.zeros(c),
        filters=draw_filters(keys[2], config.conv_width, c),
        filter_bias=jnp.zeros(c),
        input_gate=_draw_blocks(keys[3], g, c // g),
        input_bias=jnp.zeros((g, c // g)),
        recurrent_gate=_draw_blocks(keys[4], g, c // g),
        recurrent_bias=jnp.zeros((g, c // g)),
        # The inverse of softplus.
        decay=jnp.log(jnp.expm1(-0.5 * jnp.log(squares))),
        output=draw_weight(keys[6], c, d),
        output_bias=jnp.zeros(d),
    )


def _draw_blocks(key, blocks, width):
    return jax.random.normal(key, (blocks, width, width)) * width**-0.5


def init_state(config: RGLRUConfig, batch: int) -> RGLRUState:
    """The empty memory, and a convolution without inputs."""
    return RGLRUState(
        window=no_inputs(batch, config.conv_width, config.width),
        memory=gated_scan_init_state(batch, config.width),
        empty=jnp.ones(batch, bool),
    )


def step(
    config: RGLRUConfig, params: RGLRUParams, state: RGLRUState, x: Float[Array, "B D"]
) -> tuple[RGLRUState, Float[Array, "B D"]]:
    """One token: the scan's step between the projections."""
    # A segment of one, whose axis of time goes again.
    window, write, g = _inputs(params, state, x[:, None])
    memory, h = gated_scan_step(write[:, 0], g[:, 0], state.memory)
    after = RGLRUState(window, memory, jnp.zeros_like(state.empty))
    return after, _output(params, x, h)


def read(
    config: RGLRUConfig,
    params: RGLRUParams,
    state: RGLRUState,
    x: Float[Array, "B T D"],
    starts: Bool[Array, "B T"] | None = None,
) -> tuple[RGLRUState, Float[Array, "B T D"]]:
    """A segment: equal to T steps; see `segments.Read`."""
    window, write, g = _inputs(params, state, x, starts)
    memory, h = gated_scan(
        write, g, state.memory, reset=starts, implementation=config.implementation
    )
    after = RGLRUState(window, memory, jnp.zeros_like(state.empty))
    return after, _output(params, x, h)


def _inputs(params, state, x, starts=None):
    """Last inputs of the convolution; writes and log decays [B, T, C], float32."""
    positions = None if starts is None else documents.positions(starts)
    u = linear(x, params.value, params.value_bias)
    convolved = params.filters, params.filter_bias, state.window, positions
    window, u = convolve(u, *convolved, activation="none")
    share = _gate(u, params.input_gate, params.input_bias)
    pace = _gate(u, params.recurrent_gate, params.recurrent_bias)
    rate = SHARPNESS * jax.nn.softplus(params.decay.astype(jnp.float32))
    g = -pace * rate[None, None]
    if starts is None:
        starts = jnp.zeros(x.shape[:2], bool).at[:, 0].set(state.empty)
    # 1 - a², without the cancellation of a near 1.
    scale = bounded_sqrt(-jnp.expm1(2 * g))
    scale = jnp.where(starts[..., None], 1.0, scale)
    return window, scale * share * u.astype(jnp.float32), g


def _gate(u, weight, bias):
    """The sigmoid of a block-diagonal map of u [B, T, C], float32."""
    blocks = u.reshape(*u.shape[:2], *bias.shape)
    logits = jnp.einsum("btgi,gij->btgj", blocks, weight.astype(u.dtype))
    logits = logits.astype(jnp.float32) + bias.astype(jnp.float32)[None, None]
    return jax.nn.sigmoid(logits).reshape(u.shape)


@jax.custom_jvp
def bounded_sqrt(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """√x, whose gradient is 1,000 instead of more."""
    return jnp.sqrt(x)


@bounded_sqrt.defjvp
def _bounded_sqrt_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return jnp.sqrt(x), dx * jax.lax.rsqrt(jnp.maximum(4 * x, STEEPEST**-2))


def _output(params, x, h):
    """The states h, gated by the tokens x, [*B, D]."""
    gate = linear(x, params.gate, params.gate_bias)
    y = h.astype(x.dtype) * jax.nn.gelu(gate)
    return linear(y, params.output, params.output_bias)
