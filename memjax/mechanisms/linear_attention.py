"""Linear attention: a memory that adds up outer products and forgets nothing.

    S_t = S_{t-1} + k_t v_tᵀ        y_t = S_tᵀ q_t / √K

Katharopoulos et al. (2020), https://arxiv.org/abs/2006.16236, eqs. 16 to 20, without
their normalising sum: the block's RMSNorm stands in for it.

Shapes: B batch, T time, D model, H heads, K key, V value.
"""

from typing import NamedTuple

from jaxtyping import Array, Float

import memjax_kernels
from memjax.mechanisms.base import Mechanism
from memjax.mechanisms.layers import recurrent_block
from memjax.mechanisms.layers.recurrent_block import BlockConfig
from memjax_kernels.linear_attention import empty_state, step


class LinearAttentionParams(NamedTuple):
    """No gates: nothing beyond the block's weights."""


def linear_attention(config: BlockConfig) -> Mechanism:
    """Builds the mechanism for one configuration."""
    core = recurrent_block.op_core(
        init_params=lambda key: LinearAttentionParams(),
        init_memory=lambda batch: empty_state(
            batch, config.num_heads, config.key_dim, config.value_dim
        ),
        arguments=_arguments,
        op=memjax_kernels.linear_attention,
        step=step,
    )
    return recurrent_block.build(config, core)


def _arguments(
    params: LinearAttentionParams,
    x: Float[Array, "*B D"],
    q: Float[Array, "*B H K"],
    k: Float[Array, "*B H K"],
    v: Float[Array, "*B H V"],
):
    return q * q.shape[-1] ** -0.5, k, v
