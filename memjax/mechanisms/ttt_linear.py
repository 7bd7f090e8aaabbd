"""TTT-linear: the memory is a linear layer that is trained while it reads.

    η_t = rate / C · sigmoid(w x)
    ℓ_t(W, b) = ½ |LN(k_tᵀ W + b) - (v_t - k_t)|²
    W ← W - Σ η_t ∇_W ℓ_t        b likewise        y_t = q_t + LN(q_tᵀ W + b)

Sun et al. (2024), https://arxiv.org/abs/2407.04620, sections 2.4, 2.5 and 2.7. All
gradients of a mini-batch of C tokens are taken at its start; the rate is divided by
C, so that a mini-batch takes one step of their mean, as the official code does. Keys
are of unit norm here and of norm √K there, so there is no division by K, and W starts
√K times as large, at the same |LN's input|.

Shapes: B batch, T time, D model, H heads, K key, V = K value, C mini-batch.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from memjax.checks import check_positive, check_sizes
from memjax.mechanisms.base import Mechanism, axes
from memjax.mechanisms.layers import gates, recurrent_block
from memjax.mechanisms.layers.recurrent_block import (
    BlockParams,
    BlockState,
    RecurrentConfig,
    output_projection,
)
from memjax_kernels.ttt_linear import empty_state, start_state
from memjax_kernels.ttt_linear import step as op_step
from memjax_kernels.ttt_linear import ttt_linear as ttt_linear_op


@dataclasses.dataclass(frozen=True)
class TTTLinearConfig(RecurrentConfig):
    """Sizes and options of a layer of TTT-linear; `key_dim` must be `value_dim`.

    Attributes:
        chunk_size: C, tokens of a mini-batch; part of what is computed.
        rate: largest learning rate of a mini-batch, the paper's 1.
    """

    chunk_size: int = 16
    rate: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        check_sizes(chunk_size=self.chunk_size)
        check_positive(rate=self.rate)
        if self.key_dim != self.value_dim:
            raise ValueError(
                f"ttt_linear needs key_dim == value_dim, got {self.key_dim} and "
                f"{self.value_dim}"
            )

    def build(self) -> Mechanism:
        """The mechanism of these sizes."""
        return ttt_linear(self)

    def param_axes(self) -> BlockParams:
        """How the parameters are divided among devices."""
        return recurrent_block.param_axes(AXES)


class TTTParams(NamedTuple):
    """Learned gate, layer norm, and weights that the memory starts from.

    The layer norm's are flat, because weight decay passes over vectors.
    """

    rate: Float[Array, "D H"]
    scale: Float[Array, " HV"]
    shift: Float[Array, " HV"]
    weights: Float[Array, "H K V"]
    bias: Float[Array, "H V"]


AXES = TTTParams(
    rate=axes("model", "heads"),
    scale=axes(),
    shift=axes(),
    weights=axes("heads"),
    bias=axes("heads"),
)


def init_params(config: TTTLinearConfig, key: PRNGKeyArray) -> BlockParams:
    """Draws the weights of the block and of the rate, and the memory's start."""
    rate_key, weights_key = jax.random.split(recurrent_block.core_key(key))
    heads, width = config.num_heads, config.key_dim
    # Keys have norm 1 here and √K in the official code: W starts √K times as large.
    deviation = 0.02 * width**0.5
    core = TTTParams(
        rate=gates.draw_weight(rate_key, config.model_dim, heads),
        scale=jnp.ones(heads * width),
        shift=jnp.zeros(heads * width),
        weights=jax.random.normal(weights_key, (heads, width, width)) * deviation,
        bias=jnp.zeros((heads, width)),
    )
    return recurrent_block.init_params(config, core, key)


def init_state(config: TTTLinearConfig, batch: int) -> BlockState:
    """A memory that waits for its learned start."""
    memory = empty_state(batch, config.num_heads, config.key_dim, config.chunk_size)
    # The start is learned, and an empty state knows no parameters: the first call fills
    # it in.
    memory = recurrent_block.unstarted(batch, memory)
    return recurrent_block.init_state(config, batch, memory)


def step(
    config: TTTLinearConfig,
    params: BlockParams,
    state: BlockState,
    x: Float[Array, "B D"],
) -> tuple[BlockState, Float[Array, "B D"]]:
    """Trains the memory on one token and reads with its query."""
    window, q, k, v = recurrent_block.qkv_projection_step(config, params, state, x)
    memory = recurrent_block.started(state, _start(config, params.core, x.shape[0]))
    eta, scale, shift = _rate_and_norm(config, params.core, x)
    memory, y = op_step(
        q, k, v, eta, scale, shift, memory, chunk_size=config.chunk_size
    )
    state = recurrent_block.after_start(window, memory, state)
    return state, output_projection(config, params, x, y)


def apply(
    config: TTTLinearConfig,
    params: BlockParams,
    state: BlockState,
    x: Float[Array, "B T D"],
) -> tuple[BlockState, Float[Array, "B T D"]]:
    """What T steps give, a mini-batch at a time."""
    window, q, k, v = recurrent_block.qkv_projection(config, params, state, x)
    memory = recurrent_block.started(state, _start(config, params.core, x.shape[0]))
    eta, scale, shift = _rate_and_norm(config, params.core, x)
    memory, y = ttt_linear_op(
        q, k, v, eta, scale, shift, memory, chunk_size=config.chunk_size
    )
    state = recurrent_block.after_start(window, memory, state)
    return state, output_projection(config, params, x, y)


def ttt_linear(config: TTTLinearConfig) -> Mechanism:
    """Builds the mechanism for one configuration."""
    return Mechanism(
        init_params=functools.partial(init_params, config),
        init_state=functools.partial(init_state, config),
        step=functools.partial(step, config),
        apply=functools.partial(apply, config),
    )


def _start(config, params, batch):
    """The learned memory, at the start of a mini-batch, for every row."""
    return start_state(
        jnp.repeat(params.weights[None], batch, axis=0),
        jnp.repeat(params.bias[None], batch, axis=0),
        config.chunk_size,
    )


def _rate_and_norm(config, params, x):
    """η [*B, H], and the layer norm's scale and shift [H, V]."""
    heads, width = config.num_heads, config.key_dim
    eta = jax.nn.sigmoid(gates.linear_logits(x, params.rate))
    return (
        # Divided by C, so that the C gradients of a mini-batch make one step of their
        # mean.
        eta * (config.rate / config.chunk_size),
        params.scale.reshape(heads, width),
        params.shift.reshape(heads, width),
    )
