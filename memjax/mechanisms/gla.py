"""Gated linear attention: every key channel forgets at its own pace.

    g_t = log sigmoid(W₂ W₁ x) / 16
    S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ        y_t = S_tᵀ q_t / √K

Yang et al. (2023), https://arxiv.org/abs/2312.06635, section 4.4: W₁ has rank 16, and
the 16 under the logarithm keeps the gates near 1.

Shapes: B batch, T time, D model, H heads, K key, V value, R rank.
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
from memjax_kernels.linear_attention.gla import empty_state
from memjax_kernels.linear_attention.gla import gla as gla_op
from memjax_kernels.linear_attention.gla import step as op_step

# The gates of all channels come from so few numbers a token, which saves parameters.
RANK = 16
# Divides the log gates, which keeps the gates near 1.
DAMPING = 16.0


@dataclasses.dataclass(frozen=True)
class GLAConfig(RecurrentConfig):
    """Sizes of a layer of gated linear attention; see `RecurrentConfig`."""

    def build(self) -> Mechanism:
        """The mechanism of these sizes."""
        return gla(self)

    def param_axes(self) -> BlockParams:
        """How the parameters are divided among devices."""
        return recurrent_block.param_axes(AXES)


class GLAParams(NamedTuple):
    """Learned gates."""

    narrow: Float[Array, "D R"]
    widen: Float[Array, "R H K"]


AXES = GLAParams(narrow=axes("model"), widen=axes(None, "heads"))


def init_params(config: GLAConfig, key: PRNGKeyArray) -> BlockParams:
    """Draws the weights of the block and of the gates."""
    narrow_key, widen_key = jax.random.split(recurrent_block.core_key(key))
    core = GLAParams(
        narrow=gates.draw_weight(narrow_key, config.model_dim, RANK),
        widen=gates.draw_weight(widen_key, RANK, config.num_heads, config.key_dim),
    )
    return recurrent_block.init_params(config, core, key)


def init_state(config: GLAConfig, batch: int) -> BlockState:
    """The empty memory: zeros."""
    memory = empty_state(batch, config.num_heads, config.key_dim, config.value_dim)
    return recurrent_block.init_state(config, batch, memory)


def step(
    config: GLAConfig, params: BlockParams, state: BlockState, x: Float[Array, "B D"]
) -> tuple[BlockState, Float[Array, "B D"]]:
    """Writes one token and reads with its query."""
    window, q, k, v = recurrent_block.qkv_projection_step(config, params, state, x)
    g = _log_gates(params.core, x)
    memory, y = op_step(q * config.key_dim**-0.5, k, v, g, state.memory)
    return BlockState(window, memory), output_projection(config, params, x, y)


def apply(
    config: GLAConfig, params: BlockParams, state: BlockState, x: Float[Array, "B T D"]
) -> tuple[BlockState, Float[Array, "B T D"]]:
    """What T steps give, a chunk at a time."""
    window, q, k, v = recurrent_block.qkv_projection(config, params, state, x)
    g = _log_gates(params.core, x)
    memory, y = gla_op(q * config.key_dim**-0.5, k, v, g, state.memory)
    return BlockState(window, memory), output_projection(config, params, x, y)


def gla(config: GLAConfig) -> Mechanism:
    """Builds the mechanism for one configuration."""
    return Mechanism(
        init_params=functools.partial(init_params, config),
        init_state=functools.partial(init_state, config),
        step=functools.partial(step, config),
        apply=functools.partial(apply, config),
    )


def _log_gates(params: GLAParams, x: Float[Array, "*B D"]) -> Float[Array, "*B H K"]:
    # `linear_logits` gives float32; the second product is in the dtype of x as the
    # first.
    narrow = gates.linear_logits(x, params.narrow).astype(x.dtype)
    logits = gates.linear_logits(narrow, params.widen)
    return jax.nn.log_sigmoid(logits) / DAMPING
