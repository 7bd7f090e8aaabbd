"""Gated linear attention: every key channel forgets at its own pace.

    g_t = log sigmoid(W₂ W₁ x) / 16
    S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ        y_t = S_tᵀ q_t / √K

Yang et al. (2023), https://arxiv.org/abs/2312.06635, section 4.4: W₁ has rank 16, and
the 16 under the logarithm keeps the gates near 1.

Shapes: B batch, T time, D model, H heads, K key, V value, R rank.
"""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float, PRNGKeyArray

import memjax_kernels
from memjax.mechanisms.base import Mechanism
from memjax.mechanisms.layers import gates, recurrent_block
from memjax.mechanisms.layers.recurrent_block import BlockConfig
from memjax_kernels.linear_attention.gla import empty_state, step

RANK = 16
DAMPING = 16.0


class GLAParams(NamedTuple):
    """Learned gates."""

    narrow: Float[Array, "D R"]
    widen: Float[Array, "R H K"]


def gla(config: BlockConfig) -> Mechanism:
    """Builds the mechanism for one configuration."""
    heads, width = config.num_heads, config.key_dim

    def init_params(key: PRNGKeyArray) -> GLAParams:
        narrow_key, widen_key = jax.random.split(key)
        return GLAParams(
            narrow=gates.draw_weight(narrow_key, config.model_dim, RANK),
            widen=gates.draw_weight(widen_key, RANK, heads, width),
        )

    core = recurrent_block.op_core(
        init_params=init_params,
        init_memory=lambda batch: empty_state(batch, heads, width, config.value_dim),
        arguments=_arguments,
        op=memjax_kernels.gla,
        step=step,
    )
    return recurrent_block.build(config, core)


def _arguments(
    params: GLAParams,
    x: Float[Array, "*B D"],
    q: Float[Array, "*B H K"],
    k: Float[Array, "*B H K"],
    v: Float[Array, "*B H V"],
):
    narrow = gates.project(x, params.narrow).astype(x.dtype)
    logits = gates.project(narrow, params.widen)
    return q * q.shape[-1] ** -0.5, k, v, jax.nn.log_sigmoid(logits) / DAMPING
