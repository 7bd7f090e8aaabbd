"""Gated DeltaNet: the delta rule on a memory that forgets first.

    S = exp(g_t) S_{t-1}        S_t = S + β_t k_t (v_t - Sᵀ k_t)ᵀ        y_t = S_tᵀ q_t

Yang, Kautz & Hatamizadeh (2024), https://arxiv.org/abs/2412.06464, eq. 10: β as in
DeltaNet, g as in Mamba-2, unit q and k without a scale.

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
from memjax.mechanisms.mamba2 import DECAY_AXES, DecayParams, decay, init_decay
from memjax_kernels.delta_rule.gated import empty_state, gated_delta_rule
from memjax_kernels.delta_rule.gated import step as op_step


@dataclasses.dataclass(frozen=True)
class GatedDeltaNetConfig(RecurrentConfig):
    """Sizes of a layer of Gated DeltaNet; see `RecurrentConfig`."""

    def build(self) -> Mechanism:
        """The mechanism of these sizes."""
        return gated_deltanet(self)

    def param_axes(self) -> BlockParams:
        """How the parameters are divided among devices."""
        return recurrent_block.param_axes(AXES)


class GatedDeltaNetParams(NamedTuple):
    """Learned gates."""

    rate: Float[Array, "D H"]
    decay: DecayParams


AXES = GatedDeltaNetParams(rate=axes("model", "heads"), decay=DECAY_AXES)


def init_params(config: GatedDeltaNetConfig, key: PRNGKeyArray) -> BlockParams:
    """Draws the weights of the block, of β and of g."""
    rate_key, decay_key = jax.random.split(recurrent_block.core_key(key))
    core = GatedDeltaNetParams(
        rate=gates.draw_weight(rate_key, config.model_dim, config.num_heads),
        decay=init_decay(config, decay_key),
    )
    return recurrent_block.init_params(config, core, key)


def init_state(config: GatedDeltaNetConfig, batch: int) -> BlockState:
    """The empty memory: zeros."""
    memory = empty_state(batch, config.num_heads, config.key_dim, config.value_dim)
    return recurrent_block.init_state(config, batch, memory)


def step(
    config: GatedDeltaNetConfig,
    params: BlockParams,
    state: BlockState,
    x: Float[Array, "B D"],
) -> tuple[BlockState, Float[Array, "B D"]]:
    """Writes one token and reads with its query."""
    window, q, k, v = recurrent_block.qkv_projection_step(config, params, state, x)
    beta = jax.nn.sigmoid(gates.linear_logits(x, params.core.rate))
    # Mamba-2's Δ enters through the decay alone: β is the size of the write.
    _, g = decay(params.core.decay, x)
    memory, y = op_step(q, k, v, beta, g, state.memory)
    return BlockState(window, memory), output_projection(config, params, x, y)


def apply(
    config: GatedDeltaNetConfig,
    params: BlockParams,
    state: BlockState,
    x: Float[Array, "B T D"],
) -> tuple[BlockState, Float[Array, "B T D"]]:
    """What T steps give, a chunk at a time."""
    window, q, k, v = recurrent_block.qkv_projection(config, params, state, x)
    beta = jax.nn.sigmoid(gates.linear_logits(x, params.core.rate))
    _, g = decay(params.core.decay, x)
    memory, y = gated_delta_rule(q, k, v, beta, g, state.memory)
    return BlockState(window, memory), output_projection(config, params, x, y)


def gated_deltanet(config: GatedDeltaNetConfig) -> Mechanism:
    """Builds the mechanism for one configuration."""
    return Mechanism(
        init_params=functools.partial(init_params, config),
        init_state=functools.partial(init_state, config),
        step=functools.partial(step, config),
        apply=functools.partial(apply, config),
    )
