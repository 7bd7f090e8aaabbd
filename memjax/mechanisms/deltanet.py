"""DeltaNet: fast weights corrected by their own prediction error.

    S_t = S_{t-1} + β_t k_t (v_t - S_{t-1}ᵀ k_t)ᵀ        y_t = S_tᵀ q_t

Schlag, Irie & Schmidhuber (2021), https://arxiv.org/abs/2102.11174, eq. 24; Yang et
al. (2024), https://arxiv.org/abs/2406.06484, whose layer this is: unit q and k, no
scale, β = sigmoid(w x).

Shapes: B batch, T time, D model, H heads, K key, V value.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from memjax.mechanisms.base import Mechanism, axes
from memjax.mechanisms.layers import gates, recurrent_block
from memjax.mechanisms.layers.recurrent_block import (
    BlockParams,
    BlockState,
    RecurrentConfig,
    output_projection,
)
from memjax_kernels.delta_rule import delta_rule, empty_state
from memjax_kernels.delta_rule import step as op_step


@dataclasses.dataclass(frozen=True)
class DeltaNetConfig(RecurrentConfig):
    """Sizes of a layer of DeltaNet; see `RecurrentConfig`."""

    def build(self) -> Mechanism:
        """The mechanism of these sizes."""
        return deltanet(self)

    def param_axes(self) -> BlockParams:
        """How the parameters are divided among devices."""
        return recurrent_block.param_axes(AXES)


class DeltaNetParams(NamedTuple):
    """Learned gates."""

    rate: Float[Array, "D H"]


AXES = DeltaNetParams(rate=axes("model", "heads"))


def init_params(config: DeltaNetConfig, key: PRNGKeyArray) -> BlockParams:
    """Draws the weights of the block and of β."""
    rate_key = recurrent_block.core_key(key)
    rate = gates.draw_weight(rate_key, config.model_dim, config.num_heads)
    return recurrent_block.init_params(config, DeltaNetParams(rate), key)


def init_state(config: DeltaNetConfig, batch: int) -> BlockState:
    """The empty memory: zeros."""
    memory = empty_state(batch, config.num_heads, config.key_dim, config.value_dim)
    return recurrent_block.init_state(config, batch, memory)


def step(
    config: DeltaNetConfig,
    params: BlockParams,
    state: BlockState,
    x: Float[Array, "B D"],
) -> tuple[BlockState, Float[Array, "B D"]]:
    """Writes one token and reads with its query."""
    window, q, k, v = recurrent_block.qkv_projection_step(config, params, state, x)
    # k has unit norm, so that β in (0, 1) moves the prediction towards v and never past
    # it.
    beta = jax.nn.sigmoid(gates.linear_logits(x, params.core.rate))
    memory, y = op_step(q, k, v, beta, state.memory)
    return BlockState(window, memory), output_projection(config, params, x, y)


def apply(
    config: DeltaNetConfig,
    params: BlockParams,
    state: BlockState,
    x: Float[Array, "B T D"],
) -> tuple[BlockState, Float[Array, "B T D"]]:
    """What T steps give, a chunk at a time."""
    window, q, k, v = recurrent_block.qkv_projection(config, params, state, x)
    beta = jax.nn.sigmoid(gates.linear_logits(x, params.core.rate))
    memory, y = delta_rule(q, k, v, beta, state.memory)
    return BlockState(window, memory), output_projection(config, params, x, y)


def deltanet(config: DeltaNetConfig) -> Mechanism:
    """Builds the mechanism for one configuration."""
    return Mechanism(
        init_params=functools.partial(init_params, config),
        init_state=functools.partial(init_state, config),
        step=functools.partial(step, config),
        apply=functools.partial(apply, config),
    )
