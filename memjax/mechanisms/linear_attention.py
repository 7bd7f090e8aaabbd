"""Linear attention: a memory that adds up outer products and forgets nothing.

    S_t = S_{t-1} + k_t v_tᵀ        y_t = S_tᵀ q_t / √K

Katharopoulos et al. (2020), https://arxiv.org/abs/2006.16236, eqs. 16 to 20, without
their normalising sum: the block's RMSNorm stands in for it.

Shapes: B batch, T time, D model, H heads, K key, V value.
"""

import dataclasses
import functools
from typing import NamedTuple

from jaxtyping import Array, Float, PRNGKeyArray

from memjax.mechanisms.base import Mechanism
from memjax.mechanisms.layers import recurrent_block
from memjax.mechanisms.layers.recurrent_block import (
    BlockParams,
    BlockState,
    RecurrentConfig,
    output_projection,
)
from memjax_kernels.linear_attention import empty_state
from memjax_kernels.linear_attention import linear_attention as linear_attention_op
from memjax_kernels.linear_attention import step as op_step


@dataclasses.dataclass(frozen=True)
class LinearAttentionConfig(RecurrentConfig):
    """Sizes of a layer of linear attention; see `RecurrentConfig`."""

    def build(self) -> Mechanism:
        """The mechanism of these sizes."""
        return linear_attention(self)

    def param_axes(self) -> BlockParams:
        """How the parameters are divided among devices."""
        return recurrent_block.param_axes(AXES)


class LinearAttentionParams(NamedTuple):
    """No gates: nothing beyond the block's weights."""


AXES = LinearAttentionParams()


def init_params(config: LinearAttentionConfig, key: PRNGKeyArray) -> BlockParams:
    """Draws the block's weights."""
    return recurrent_block.init_params(config, LinearAttentionParams(), key)


def init_state(config: LinearAttentionConfig, batch: int) -> BlockState:
    """The empty memory: zeros."""
    memory = empty_state(batch, config.num_heads, config.key_dim, config.value_dim)
    return recurrent_block.init_state(config, batch, memory)


def step(
    config: LinearAttentionConfig,
    params: BlockParams,
    state: BlockState,
    x: Float[Array, "B D"],
) -> tuple[BlockState, Float[Array, "B D"]]:
    """Writes one token and reads with its query."""
    window, q, k, v = recurrent_block.qkv_projection_step(config, params, state, x)
    # No normalising sum: the block's RMSNorm stands in for it.
    memory, y = op_step(q * config.key_dim**-0.5, k, v, state.memory)
    return BlockState(window, memory), output_projection(config, params, x, y)


def apply(
    config: LinearAttentionConfig,
    params: BlockParams,
    state: BlockState,
    x: Float[Array, "B T D"],
) -> tuple[BlockState, Float[Array, "B T D"]]:
    """What T steps give, a chunk at a time."""
    window, q, k, v = recurrent_block.qkv_projection(config, params, state, x)
    memory, y = linear_attention_op(q * config.key_dim**-0.5, k, v, state.memory)
    return BlockState(window, memory), output_projection(config, params, x, y)


def linear_attention(config: LinearAttentionConfig) -> Mechanism:
    """Builds the mechanism for one configuration."""
    return Mechanism(
        init_params=functools.partial(init_params, config),
        init_state=functools.partial(init_state, config),
        step=functools.partial(step, config),
        apply=functools.partial(apply, config),
    )
