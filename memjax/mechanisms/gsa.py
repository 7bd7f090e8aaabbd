"""Gated slot attention: a fixed number of slots, each forgetting at its own pace.

    g_t = log sigmoid(W x) / 8        α_t = 1 - exp(g_t)
    K̃_t = diag(exp(g_t)) K̃_{t-1} + α_t k_tᵀ        Ṽ_t likewise with v_t
    y_t = Ṽ_tᵀ softmax(K̃_t q_t √K)

Zhang et al. (2024), https://arxiv.org/abs/2409.07146, section 3. A slot is a mean of
unit keys, so unscaled scores would lie in [-1, 1] and hardly choose: √K gives them the
range that unit-variance queries and keys have under the usual 1 / √K.

Shapes: B batch, T time, D model, H heads, K key, V value, M slots.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

import memjax_kernels
from memjax.checks import check_sizes
from memjax.mechanisms.base import Mechanism
from memjax.mechanisms.layers import gates, recurrent_block
from memjax.mechanisms.layers.recurrent_block import BlockConfig
from memjax_kernels.gated_slots import empty_state, step

DAMPING = 8.0


class GSAParams(NamedTuple):
    """Learned gates."""

    forget: Float[Array, "D H M"]


def gsa(config: BlockConfig, slots: int = 64) -> Mechanism:
    """Builds the mechanism for one configuration and number of slots M."""
    check_sizes(slots=slots)
    heads = config.num_heads

    def init_params(key: PRNGKeyArray) -> GSAParams:
        weight = gates.draw_weight(key, config.model_dim, heads, slots)
        return GSAParams(weight)

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
    params: GSAParams,
    x: Float[Array, "*B D"],
    q: Float[Array, "*B H K"],
    k: Float[Array, "*B H K"],
    v: Float[Array, "*B H V"],
):
    g = jax.nn.log_sigmoid(gates.project(x, params.forget)) / DAMPING
    return q * q.shape[-1] ** 0.5, k, v, -jnp.expm1(g), g
