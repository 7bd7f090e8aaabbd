"""Memories of a fixed number of slots, each a weighted mean or sum of tokens.

Gated slot attention (GSA): every slot forgets at its own pace.

    g_t = log sigmoid(W x) / 8        α_t = 1 - exp(g_t)
    K̃_t = diag(exp(g_t)) K̃_{t-1} + α_t k_tᵀ        Ṽ_t likewise with v_t
    y_t = Ṽ_tᵀ softmax(K̃_t q_t √K)

Zhang et al. (2024), https://arxiv.org/abs/2409.07146, section 3. A slot is a mean of
unit keys, so unscaled scores would lie in [-1, 1] and hardly choose: √K gives them the
range that unit-variance queries and keys have under the usual 1 / √K.

Attention with bounded memory (ABC): nothing is forgotten.

    α_t = softmax over slots of W x
    K̃_t = K̃_{t-1} + α_t k_tᵀ        Ṽ_t = Ṽ_{t-1} + α_t v_tᵀ
    y_t = Ṽ_tᵀ softmax(K̃_t q_t / √K)

Peng et al. (2021), https://arxiv.org/abs/2110.02488, sections 3 and 4, with each token
divided among the slots. A slot is a sum of keys and grows with the text, so scores
are scaled down as in attention.

Shapes: B batch, T time, D model, H heads, K key, V value, M slots.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from memjax.checks import check_sizes
from memjax.mechanisms.base import Mechanism, axes
from memjax.mechanisms.layers import gates, recurrent_block
from memjax.mechanisms.layers.recurrent_block import (
    BlockParams,
    BlockState,
    RecurrentConfig,
    output_projection,
)
from memjax_kernels.gated_slots import empty_state, gated_slots
from memjax_kernels.gated_slots import step as op_step

# Divides the log gates, which keeps the gates near 1.
DAMPING = 8.0


@dataclasses.dataclass(frozen=True)
class GSAConfig(RecurrentConfig):
    """Sizes of a layer of gated slot attention.

    Attributes:
        slots: M, of each head.
    """

    slots: int = 64

    def __post_init__(self):
        super().__post_init__()
        check_sizes(slots=self.slots)

    def build(self) -> Mechanism:
        """The mechanism of these sizes."""
        return gsa(self)

    def param_axes(self) -> BlockParams:
        """How the parameters are divided among devices."""
        return recurrent_block.param_axes(GSA_AXES)


@dataclasses.dataclass(frozen=True)
class ABCConfig(RecurrentConfig):
    """Sizes of a layer of attention with bounded memory.

    Attributes:
        slots: M, of each head.
    """

    slots: int = 64

    def __post_init__(self):
        super().__post_init__()
        check_sizes(slots=self.slots)

    def build(self) -> Mechanism:
        """The mechanism of these sizes."""
        return abc(self)

    def param_axes(self) -> BlockParams:
        """How the parameters are divided among devices."""
        return recurrent_block.param_axes(ABC_AXES)


# Two types of parameters, by which `_gates` tells the mechanisms apart.
class GSAParams(NamedTuple):
    """Learned gates."""

    forget: Float[Array, "D H M"]


GSA_AXES = GSAParams(forget=axes("model", "heads"))


class ABCParams(NamedTuple):
    """Learned targets."""

    target: Float[Array, "D H M"]


ABC_AXES = ABCParams(target=axes("model", "heads"))


def init_params(config: GSAConfig | ABCConfig, key: PRNGKeyArray) -> BlockParams:
    """Draws the weights of the block and of the slots' gates."""
    weight = gates.draw_weight(
        recurrent_block.core_key(key), config.model_dim, config.num_heads, config.slots
    )
    core = GSAParams(weight) if isinstance(config, GSAConfig) else ABCParams(weight)
    return recurrent_block.init_params(config, core, key)


def init_state(config: GSAConfig | ABCConfig, batch: int) -> BlockState:
    """Empty slots: zeros."""
    heads, slots = config.num_heads, config.slots
    memory = empty_state(batch, heads, slots, config.key_dim, config.value_dim)
    return recurrent_block.init_state(config, batch, memory)


def step(
    config: GSAConfig | ABCConfig,
    params: BlockParams,
    state: BlockState,
    x: Float[Array, "B D"],
) -> tuple[BlockState, Float[Array, "B D"]]:
    """Writes one token and reads with its query."""
    window, q, k, v = recurrent_block.qkv_projection_step(config, params, state, x)
    q, alpha, g = _gates(params.core, x, q)
    memory, y = op_step(q, k, v, alpha, g, state.memory)
    return BlockState(window, memory), output_projection(config, params, x, y)


def apply(
    config: GSAConfig | ABCConfig,
    params: BlockParams,
    state: BlockState,
    x: Float[Array, "B T D"],
) -> tuple[BlockState, Float[Array, "B T D"]]:
    """What T steps give, a chunk at a time."""
    window, q, k, v = recurrent_block.qkv_projection(config, params, state, x)
    q, alpha, g = _gates(params.core, x, q)
    memory, y = gated_slots(q, k, v, alpha, g, state.memory)
    return BlockState(window, memory), output_projection(config, params, x, y)


def gsa(config: GSAConfig) -> Mechanism:
    """Builds gated slot attention for one configuration."""
    return Mechanism(
        init_params=functools.partial(init_params, config),
        init_state=functools.partial(init_state, config),
        step=functools.partial(step, config),
        apply=functools.partial(apply, config),
    )


def abc(config: ABCConfig) -> Mechanism:
    """Builds attention with bounded memory for one configuration."""
    return Mechanism(
        init_params=functools.partial(init_params, config),
        init_state=functools.partial(init_state, config),
        step=functools.partial(step, config),
        apply=functools.partial(apply, config),
    )


def _gates(params, x, q):
    """Scaled queries, α [*B, H, M] and g, which is None where nothing is forgotten."""
    if isinstance(params, GSAParams):
        # A slot is a mean of unit keys: unscaled scores would lie in [-1, 1] and hardly
        # choose.
        g = jax.nn.log_sigmoid(gates.linear_logits(x, params.forget)) / DAMPING
        # expm1, because 1 - exp(g) cancels for gates near 1.
        return q * q.shape[-1] ** 0.5, -jnp.expm1(g), g
    # Each token is divided among the slots. Their sums of keys grow with the text, so
    # scores are scaled down as in attention.
    alpha = jax.nn.softmax(gates.linear_logits(x, params.target), axis=-1)
    return q * q.shape[-1] ** -0.5, alpha, None
