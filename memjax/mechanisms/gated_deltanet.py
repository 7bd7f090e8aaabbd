"""Gated DeltaNet: the delta rule on a memory that forgets first.

    S = exp(g_t) S_{t-1}        S_t = S + β_t k_t (v_t - Sᵀ k_t)ᵀ        y_t = S_tᵀ q_t

Yang, Kautz & Hatamizadeh (2024), https://arxiv.org/abs/2412.06464, eq. 10: β as in
DeltaNet, g as in Mamba-2, unit q and k without a scale.

Shapes: B batch, T time, D model, H heads, K key, V value.
"""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float, PRNGKeyArray

import memjax_kernels
from memjax.mechanisms.base import Mechanism
from memjax.mechanisms.layers import gates, recurrent_block
from memjax.mechanisms.layers.recurrent_block import BlockConfig
from memjax.mechanisms.mamba2 import DecayParams, decay, init_decay
from memjax_kernels.delta_rule.gated import empty_state, step


class GatedDeltaNetParams(NamedTuple):
    """Learned gates."""

    rate: Float[Array, "D H"]
    decay: DecayParams


def gated_deltanet(config: BlockConfig) -> Mechanism:
    """Builds the mechanism for one configuration."""

    def init_params(key: PRNGKeyArray) -> GatedDeltaNetParams:
        rate_key, decay_key = jax.random.split(key)
        return GatedDeltaNetParams(
            rate=gates.draw_weight(rate_key, config.model_dim, config.num_heads),
            decay=init_decay(config, decay_key),
        )

    core = recurrent_block.op_core(
        init_params=init_params,
        init_memory=lambda batch: empty_state(
            batch, config.num_heads, config.key_dim, config.value_dim
        ),
        arguments=_arguments,
        op=memjax_kernels.gated_delta_rule,
        step=step,
    )
    return recurrent_block.build(config, core)


def _arguments(
    params: GatedDeltaNetParams,
    x: Float[Array, "*B D"],
    q: Float[Array, "*B H K"],
    k: Float[Array, "*B H K"],
    v: Float[Array, "*B H V"],
):
    beta = jax.nn.sigmoid(gates.project(x, params.rate))
    return q, k, v, beta, decay(params.decay, x)[1]
