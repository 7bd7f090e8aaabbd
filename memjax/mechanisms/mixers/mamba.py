"""Mamba: a selective state space of each channel.

    u = silu(conv(W_u x))        [low, b, c] = W_s u        Δ = softplus(W_Δ low + bias)
    S_t = exp(-exp(log A) Δ_t) S_{t-1} + b_t (Δ_t u_t)ᵀ        y_t = S_tᵀ c_t + s u_t
    out = W_o (y ∘ silu(W_z x))

Gu & Dao (2023), https://arxiv.org/abs/2312.00752, section 3 and figure 3. Falcon Mamba
divides low, b and c by their rms, without a scale: Zuo et al. (2024),
https://arxiv.org/abs/2410.05355. Initialised as in Mamba: A_n = n, Δ in
[0.001, 0.1].

Shapes: B batch, T time, D model, I inner channels, N states of a channel, R rank of Δ,
W width of the convolution.
"""

import dataclasses
from typing import ClassVar, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from memjax.checks import check_flags, check_positive, check_sizes, require_known
from memjax.mechanisms.base import Mechanism, axes
from memjax.mechanisms.config import MechanismDefaults
from memjax.mechanisms.layers import documents
from memjax.mechanisms.layers.convolution import convolve, draw_filters, no_inputs
from memjax.mechanisms.layers.gates import draw_weight
from memjax.mechanisms.layers.norms import rms_norm
from memjax.mechanisms.layers.projections import Weight, linear
from memjax.mechanisms.layers.recurrent.style import Implementation
from memjax.mechanisms.mixers import segments
from memjax_kernels import (
    selective_scan,
    selective_scan_init_state,
    selective_scan_step,
)


@dataclasses.dataclass(frozen=True)
class MambaConfig(MechanismDefaults):
    """Sizes of a layer of Mamba.

    Attributes:
        model_dim: D, width of the layer's input and output.
        inner_dim: I, channels; 2 D in the paper.
        state_dim: N, states of a channel.
        dt_rank: R, of the map to Δ; D / 16 in the paper.
        conv_width: W, taps of the convolution, at least 2.
        conv_bias: whether the convolution has a bias.
        bias: whether the maps from and to D have biases.
        norm_epsilon: of the norms of Δ's input, b and c; None is without, as in Mamba.
        implementation: of a segment, with equal results; None is the fastest.
    """

    name: ClassVar[str] = "mamba"

    model_dim: int
    inner_dim: int
    state_dim: int
    dt_rank: int
    conv_width: int = 4
    conv_bias: bool = True
    bias: bool = False
    norm_epsilon: float | None = None
    implementation: Implementation | None = None

    def __post_init__(self):
        check_flags(self)
        check_sizes(
            model_dim=self.model_dim,
            inner_dim=self.inner_dim,
            state_dim=self.state_dim,
            dt_rank=self.dt_rank,
        )
        check_sizes(least=2, conv_width=self.conv_width)
        if self.norm_epsilon is not None:
            check_positive(most=1.0, norm_epsilon=self.norm_epsilon)
        known = (None, *get_args(Implementation))
        require_known("implementation", self.implementation, known)

    def build(self) -> Mechanism:
        """The mechanism of these sizes."""
        return segments.mechanism(self, init_params, init_state, step, read)

    def param_axes(self) -> "MambaParams":
        """Sharding axes of the parameters."""
        return MambaParams(
            value=axes("model", "heads"),
            gate=axes("model", "heads"),
            filters=axes(None, "heads"),
            selection=axes("heads"),
            pace=axes(None, "heads"),
            pace_bias=axes(),
            log_rate=axes(None, "heads"),
            skip=axes(),
            output=axes("heads", "model"),
            value_bias=axes(),
            gate_bias=axes(),
            filter_bias=axes(),
            output_bias=axes(),
        )


class MambaParams(NamedTuple):
    """Learned parameters; biases that a model lacks are None."""

    value: Float[Array, "D I"] | Weight  # W_u
    gate: Float[Array, "D I"] | Weight  # W_z
    filters: Float[Array, "W I"]
    selection: Float[Array, "I R+2*N"] | Weight  # W_s, to low, b and c
    pace: Float[Array, "R I"] | Weight  # W_Δ
    pace_bias: Float[Array, " I"]
    log_rate: Float[Array, "N I"]  # log A
    skip: Float[Array, " I"]
    output: Float[Array, "I D"] | Weight
    value_bias: Float[Array, " I"] | None = None
    gate_bias: Float[Array, " I"] | None = None
    filter_bias: Float[Array, " I"] | None = None
    output_bias: Float[Array, " D"] | None = None

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Names of the matrices that LoRA may change."""
        return "value", "gate", "selection", "pace", "output"


class MambaState(NamedTuple):
    """The memory, and the last inputs of the convolution, in float32."""

    window: Float[Array, "B _ I"]
    memory: Float[Array, "B N I"]


class _Inputs(NamedTuple):
    """Last inputs of the convolution, and what the scan reads."""

    window: Float[Array, "B _ I"]
    u: Float[Array, "B T I"]
    delta: Float[Array, "B T I"]
    b: Float[Array, "B T N"]
    c: Float[Array, "B T N"]


def init_params(config: MambaConfig, key: PRNGKeyArray) -> MambaParams:
    """Draws the weights; A_n is n, Δ log-uniform in [0.001, 0.1], the skip 1."""
    d, i, n, r = config.model_dim, config.inner_dim, config.state_dim, config.dt_rank
    keys = jax.random.split(key, 7)
    low, high = jnp.log(0.001), jnp.log(0.1)
    delta = jnp.exp(jax.random.uniform(keys[5], (i,), minval=low, maxval=high))
    bound = r**-0.5
    rates = jnp.arange(1, n + 1, dtype=jnp.float32)
    return MambaParams(
        value=draw_weight(keys[0], d, i),
        gate=draw_weight(keys[1], d, i),
        filters=draw_filters(keys[2], config.conv_width, i),
        selection=draw_weight(keys[3], i, r + 2 * n),
        pace=jax.random.uniform(keys[4], (r, i), minval=-bound, maxval=bound),
        # The inverse of softplus: Δ starts at the drawn pace.
        pace_bias=jnp.log(jnp.expm1(delta)),
        log_rate=jnp.repeat(jnp.log(rates)[:, None], i, axis=1),
        skip=jnp.ones(i),
        output=draw_weight(keys[6], i, d),
        value_bias=jnp.zeros(i) if config.bias else None,
        gate_bias=jnp.zeros(i) if config.bias else None,
        filter_bias=jnp.zeros(i) if config.conv_bias else None,
        output_bias=jnp.zeros(d) if config.bias else None,
    )


def init_state(config: MambaConfig, batch: int) -> MambaState:
    """The empty memory, and a convolution without inputs."""
    return MambaState(
        window=no_inputs(batch, config.conv_width, config.inner_dim),
        memory=selective_scan_init_state(batch, config.inner_dim, config.state_dim),
    )


def step(
    config: MambaConfig, params: MambaParams, state: MambaState, x: Float[Array, "B D"]
) -> tuple[MambaState, Float[Array, "B D"]]:
    """One token: the scan's step between the projections."""
    # A segment of one, whose axis of time goes again.
    window, *token = _inputs(config, params, state.window, x[:, None])
    u, delta, b, c = (z[:, 0] for z in token)
    memory, y = selective_scan_step(u, delta, _rates(params), b, c, state.memory)
    return MambaState(window, memory), _output(params, x, u, y)


def read(
    config: MambaConfig,
    params: MambaParams,
    state: MambaState,
    x: Float[Array, "B T D"],
    starts: Bool[Array, "B T"] | None = None,
) -> tuple[MambaState, Float[Array, "B T D"]]:
    """A segment: equal to T steps; see `segments.Read`."""
    window, u, delta, b, c = _inputs(config, params, state.window, x, starts)
    memory, y = selective_scan(
        u,
        delta,
        _rates(params),
        b,
        c,
        state.memory,
        reset=starts,
        implementation=config.implementation,
    )
    return MambaState(window, memory), _output(params, x, u, y)


def _inputs(config, params, window, x, starts=None):
    positions = None if starts is None else documents.positions(starts)
    u = linear(x, params.value, params.value_bias)
    convolved = params.filters, params.filter_bias, window, positions
    window, u = convolve(u, *convolved, activation="silu")
    sizes = config.dt_rank, config.dt_rank + config.state_dim
    parts = jnp.split(linear(u, params.selection), sizes, axis=-1)
    if config.norm_epsilon is not None:
        epsilon = config.norm_epsilon
        parts = [rms_norm(z, jnp.ones(z.shape[-1]), epsilon) for z in parts]
    low, b, c = parts
    # The product runs in the dtype of the tokens, softplus in float32.
    logits = linear(low, params.pace).astype(jnp.float32)
    bias = params.pace_bias.astype(jnp.float32)
    delta = jax.nn.softplus(logits + bias[None, None])
    return _Inputs(window, u, delta, b, c)


def _rates(params):
    """-A, [N, I]."""
    return -jnp.exp(params.log_rate.astype(jnp.float32))


def _output(params, x, u, y):
    """The reads y and the skip of u, gated by the tokens x, [*B, D]."""
    skip = params.skip.reshape((1,) * (u.ndim - 1) + (-1,))
    y = y + (skip * u).astype(y.dtype)
    gate = linear(x, params.gate, params.gate_bias)
    return linear(y * jax.nn.silu(gate), params.output, params.output_bias)
