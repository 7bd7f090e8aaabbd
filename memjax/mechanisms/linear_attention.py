"""Linear attention: a sum of outer products of keys and values.

    S_t = S_{t-1} + k_t v_tᵀ        y_t = S_tᵀ q_t / √K

Katharopoulos et al. (2020), https://arxiv.org/abs/2006.16236, eqs. 16 to 20, without
their normalising sum: the block's RMSNorm stands in for it.

Retention: head h forgets at its own pace, and pairs of channels turn with positions.

    S_t = γ_h S_{t-1} + R_t k_t v_tᵀ    y_t = S_tᵀ R_t q_t / √K    γ_h = 1 - 2^(-5-h)

Sun et al. (2023), https://arxiv.org/abs/2307.08621, sections 2.1 and 2.2; R is RoPE.
Reads depend on differences of positions alone, so positions are counted from the next
token: the memory is turned back after a segment, and needs no count of tokens.

Shapes: B batch, T time, D model, H heads, G of keys, K key, V value.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from memjax.mechanisms.cells.base import Cell, bind
from memjax.mechanisms.layers import rope
from memjax.mechanisms.layers.divided_sequence import linear_share
from memjax.mechanisms.layers.recurrent.block import RecurrentConfig
from memjax_kernels import linear_attention as linear_attention_op
from memjax_kernels import (
    linear_attention_init_state,
    linear_attention_step,
    ssd,
    ssd_step,
)

# Of the paper's RoPE.
THETA = 10_000.0


@dataclasses.dataclass(frozen=True)
class LinearAttentionConfig(RecurrentConfig):
    """Sizes of a layer of linear attention; see `RecurrentConfig`.

    Attributes:
        retention: whether memories decay, and queries and keys turn with positions.
    """

    name: ClassVar[str] = "linear_attention"

    retention: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.retention and self.key_dim % 2:
            raise ValueError(f"key_dim must be even with retention, got {self.key_dim}")

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
            shares_keys=True,
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
    q = q * config.key_dim**-0.5
    if not config.retention:
        return linear_attention_step(q, k, v, memory)
    g = jnp.broadcast_to(_log_decays(config), v.shape[:2])
    memory, y = ssd_step(q, k, v, g, memory)
    return _turned_back(memory, 1), y


def apply(
    config: LinearAttentionConfig,
    params: LinearAttentionParams,
    memory: Float[Array, "B H K V"] | None,
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    x: Float[Array, "B T D"],
    reset: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """Equal to T steps, computed chunk by chunk."""
    del params, x
    q = q * config.key_dim**-0.5
    options = {"reset": reset, "implementation": config.implementation}
    if not config.retention:
        return linear_attention_op(q, k, v, memory, **options)
    tokens = v.shape[1]
    positions = jnp.arange(tokens, dtype=jnp.int32)[None]
    q, k = rope.rotate(q, positions, THETA), rope.rotate(k, positions, THETA)
    g = jnp.broadcast_to(_log_decays(config), v.shape[:3])
    memory, y = ssd(q, k, v, g, memory, **options)
    return _turned_back(memory, tokens), y


def _log_decays(config):
    """log γ of each head."""
    return jnp.log1p(-(2.0 ** -(5.0 + jnp.arange(config.num_heads, dtype=jnp.float32))))


def _turned_back(memory, tokens):
    """The memory [B, H, K, V] when the position of the next token becomes 0."""
    back = jnp.full((1,), -tokens, jnp.int32)
    cos, sin = (
        t[0][None, None, :, None] for t in rope.tables(memory.shape[2], back, THETA)
    )
    first, second = jnp.split(memory, 2, axis=2)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=2
    )
