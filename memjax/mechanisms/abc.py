"""Attention with bounded memory: tokens are added to slots and never forgotten.

    α_t = softmax over slots of W x
    K̃_t = K̃_{t-1} + α_t k_tᵀ        Ṽ_t = Ṽ_{t-1} + α_t v_tᵀ
    y_t = Ṽ_tᵀ softmax(K̃_t q_t / √K)

Peng et al. (2021), https://arxiv.org/abs/2110.02488, sections 3 and 4, with each token
shared out among the slots. A slot is a sum of keys and grows with the text, so scores
are scaled down as in attention.

Shapes: B batch, T time, D model, H heads, K key, V value, M slots.
"""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float, PRNGKeyArray

import memjax_kernels
from memjax.checks import check_sizes
from memjax.mechanisms.base import Mechanism
from memjax.mechanisms.layers import gates, recurrent_block
from memjax.mechanisms.layers.recurrent_block import BlockConfig
from memjax_kernels.gated_slots import empty_state, step


class ABCParams(NamedTuple):
    """Learned targets."""

    target: Float[Array, "D H M"]


def abc(config: BlockConfig, slots: int = 64) -> Mechanism:
    """Builds the mechanism for one configuration and number of slots M."""
    check_sizes(slots=slots)
    heads = config.num_heads

    def init_params(key: PRNGKeyArray) -> ABCParams:
        weight = gates.draw_weight(key, config.model_dim, heads, slots)
        return ABCParams(weight)

    core = recurrent_block.op_core(
        init_params=init_params,
        init_memory=lambda batch: empty_state(
            batch, heads, slots, config.key_dim, config.value_dim
        ),
        arguments=_arguments,
        op=memjax_kernels.gated_slots,
        step=step,
    )
    return recurrent_block.build(config, core)


def _arguments(
    params: ABCParams,
    x: Float[Array, "*B D"],
    q: Float[Array, "*B H K"],
    k: Float[Array, "*B H K"],
    v: Float[Array, "*B H V"],
):
    alpha = jax.nn.softmax(gates.project(x, params.target), axis=-1)
    return q * q.shape[-1] ** -0.5, k, v, alpha, None
