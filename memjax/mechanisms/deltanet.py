"""DeltaNet: fast weights corrected by their own prediction error.

    S_t = S_{t-1} + β_t k_t (v_t - S_{t-1}ᵀ k_t)ᵀ        y_t = S_tᵀ q_t

Schlag, Irie & Schmidhuber (2021), https://arxiv.org/abs/2102.11174, eq. 24; Yang et
al. (2024), https://arxiv.org/abs/2406.06484, whose layer this is: unit q and k, no
scale, β = sigmoid(w x).

Shapes: B batch, T time, D model, H heads, K key, V value.
"""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float, PRNGKeyArray

import memjax_kernels
from memjax.mechanisms.base import Mechanism
from memjax.mechanisms.layers import gates, recurrent_block
from memjax.mechanisms.layers.recurrent_block import BlockConfig
from memjax_kernels.delta_rule import empty_state, step


class DeltaNetParams(NamedTuple):
    """Learned gates."""

    rate: Float[Array, "D H"]


def deltanet(config: BlockConfig) -> Mechanism:
    """Builds the mechanism for one configuration."""

    def init_params(key: PRNGKeyArray) -> DeltaNetParams:
        rate = gates.draw_weight(key, config.model_dim, config.num_heads)
        return DeltaNetParams(rate)

    core = recurrent_block.op_core(
        init_params=init_params,
        init_memory=lambda batch: empty_state(
            batch, config.num_heads, config.key_dim, config.value_dim
        ),
        arguments=_arguments,
        op=memjax_kernels.delta_rule,
        step=step,
    )
    return recurrent_block.build(config, core)


def _arguments(
    params: DeltaNetParams,
    x: Float[Array, "*B D"],
    q: Float[Array, "*B H K"],
    k: Float[Array, "*B H K"],
    v: Float[Array, "*B H V"],
):
    return q, k, v, jax.nn.sigmoid(gates.project(x, params.rate))
