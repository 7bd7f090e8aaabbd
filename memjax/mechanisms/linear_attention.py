"""Linear attention: a sum of outer products of keys and values.

    S_t = S_{t-1} + k_t v_tᵀ        y_t = S_tᵀ q_t / √K

Katharopoulos et al. (2020), https://arxiv.org/abs/2006.16236, eqs. 16 to 20, without
their normalising sum: the block's RMSNorm stands in for it.

Shapes: B batch, T time, D model, H heads, K key, V value.
"""

import dataclasses
from typing import ClassVar, NamedTuple

from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from memjax.mechanisms.cells.base import Cell, bind
from memjax.mechanisms.layers.divided_sequence import linear_share
from memjax.mechanisms.layers.recurrent.block import RecurrentConfig
from memjax_kernels import linear_attention as linear_attention_op
from memjax_kernels import linear_attention_init_state, linear_attention_step


@dataclasses.dataclass(frozen=True)
class LinearAttentionConfig(RecurrentConfig):
    """Sizes of a layer of linear attention; see `RecurrentConfig`."""

    name: ClassVar[str] = "linear_attention"

    def cell(self) -> Cell:
        """The cell of these sizes."""
        return bind(
            self,
            init_params,
            init_state,
            step,
            apply,
            reset_chunk=1,
            apply_share=linear_share(apply),
        )

    def cell_axes(self) -> PyTree:
        """Sharding axes of its parameters."""
        return AXES


class LinearAttentionParams(NamedTuple):
    """No parameters."""


AXES = LinearAttentionParams()


def init_params(
    config: LinearAttentionConfig, key: PRNGKeyArray
) -> LinearAttentionParams:
    """No parameters."""
    del config, key
    return LinearAttentionParams()


def init_state(config: LinearAttentionConfig, batch: int) -> Float[Array, "B H K V"]:
    """The empty memory: zeros."""
    return linear_attention_init_state(
        batch, config.num_heads, config.key_dim, config.value_dim
    )


def step(
    config: LinearAttentionConfig,
    params: LinearAttentionParams,
    memory: Float[Array, "B H K V"],
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    x: Float[Array, "B D"],
) -> tuple[Float[Array, "B H K V"], Float[Array, "B H V"]]:
    """Writes one token and reads with its query."""
    # No gates to read from x, and no normalising sum: the block's RMSNorm stands in for
    # it.
    del params, x
    return linear_attention_step(q * config.key_dim**-0.5, k, v, memory)


def apply(
    config: LinearAttentionConfig,
    params: LinearAttentionParams,
    memory: Float[Array, "B H K V"] | None,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    x: Float[Array, "B T D"],
    reset: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """Equal to T steps, computed chunk by chunk."""
    del params, x
    q = q * config.key_dim**-0.5
    return linear_attention_op(
        q, k, v, memory, reset=reset, implementation=config.implementation
    )
