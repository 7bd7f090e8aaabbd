"""Slot memories: each slot is a weighted mean or sum of tokens.

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

Shapes: B batch, T time, D model, H heads, G key heads, which divide them, K key, V
value, M slots.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from memjax.checks import check_positive, check_sizes
from memjax.mechanisms.base import axes
from memjax.mechanisms.cells.base import Cell, bind
from memjax.mechanisms.layers import gates
from memjax.mechanisms.layers.divided_sequence import join_shares
from memjax.mechanisms.layers.recurrent.block import RecurrentConfig
from memjax_kernels import (
    GatedSlotsState,
    gated_slots,
    gated_slots_init_state,
    gated_slots_step,
)


@dataclasses.dataclass(frozen=True)
class SlotsConfig(RecurrentConfig):
    """Sizes that GSA and ABC share.

    Attributes:
        slots: M, of each head.
    """

    name: ClassVar[str]

    slots: int = 64

    def __post_init__(self):
        super().__post_init__()
        check_sizes(slots=self.slots)

    def cell(self) -> Cell:
        """The cell of these sizes."""
        return bind(
            self,
            init_params,
            init_state,
            step,
            apply,
            reset_chunk=1,
            apply_share=apply_share,
            shares_keys=True,
        )


@dataclasses.dataclass(frozen=True)
class GSAConfig(SlotsConfig):
    """Sizes of a layer of gated slot attention.

    Attributes:
        damping: divides the log gates, which keeps the gates near 1.
    """

    name: ClassVar[str] = "gsa"

    damping: float = 8.0

    def __post_init__(self):
        super().__post_init__()
        check_positive(damping=self.damping)

    def with_half_lives(
        self,
        params: "GSAParams",
        half_lives: tuple[float, float],
        constant: Float[Array, " D"],
    ) -> "GSAParams":
        """Gates of given half-lives, a slot; see `CellConfig`."""
        logits = gates.half_life_logits(half_lives, self.slots, self.damping)
        return GSAParams(params.forget + constant[:, None, None] * logits[None, None])

    def cell_axes(self) -> PyTree:
        """Sharding axes of its parameters."""
        return GSA_AXES


@dataclasses.dataclass(frozen=True)
class ABCConfig(SlotsConfig):
    """Sizes of a layer of attention with bounded memory."""

    name: ClassVar[str] = "abc"

    def cell_axes(self) -> PyTree:
        """Sharding axes of its parameters."""
        return ABC_AXES


class GSAParams(NamedTuple):
    """Learned gates."""

    forget: Float[Array, "D H M"]


GSA_AXES = GSAParams(forget=axes("model", "heads"))


class ABCParams(NamedTuple):
    """Learned targets."""

    target: Float[Array, "D H M"]


ABC_AXES = ABCParams(target=axes("model", "heads"))


def init_params(config: SlotsConfig, key: PRNGKeyArray) -> GSAParams | ABCParams:
    """Draws the weights of the slots' gates."""
    weight = gates.draw_weight(key, config.model_dim, config.num_heads, config.slots)
    return GSAParams(weight) if isinstance(config, GSAConfig) else ABCParams(weight)


def init_state(config: SlotsConfig, batch: int) -> GatedSlotsState:
    """Empty slots: zeros."""
    heads, slots = config.num_heads, config.slots
    return gated_slots_init_state(batch, heads, slots, config.key_dim, config.value_dim)


def step(
    config: SlotsConfig,
    params: GSAParams | ABCParams,
    memory: GatedSlotsState,
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    x: Float[Array, "B D"],
) -> tuple[GatedSlotsState, Float[Array, "B H V"]]:
    """Writes one token and reads with its query."""
    q, alpha, g = _gates(config, params, x, q)
    return gated_slots_step(q, k, v, alpha, g, memory)


def apply(
    config: SlotsConfig,
    params: GSAParams | ABCParams,
    memory: GatedSlotsState | None,
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    x: Float[Array, "B T D"],
    reset: Bool[Array, "B T"] | None = None,
) -> tuple[GatedSlotsState, Float[Array, "B T H V"]]:
    """Equal to T steps, computed chunk by chunk."""
    q, alpha, g = _gates(config, params, x, q)
    return gated_slots(
        q, k, v, alpha, g, memory, reset=reset, implementation=config.implementation
    )


def apply_share(
    config: SlotsConfig,
    params: GSAParams | ABCParams,
    memory: GatedSlotsState | None,
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    x: Float[Array, "B T D"],
    reset: Bool[Array, "B T"] | None = None,
) -> tuple[GatedSlotsState, Float[Array, "B T H V"]]:
    """`apply` of this device's tokens; see `divided_sequence`.

    Writes do not depend on the memory; only reads need the tokens of other devices.
    """
    q, alpha, g = _gates(config, params, x, q)
    options = {"reset": reset, "implementation": config.implementation}

    def read(memory):
        return gated_slots(q, k, v, alpha, g, memory, **options)

    added, _ = read(None)
    decay = jnp.ones_like(alpha[:, 0]) if g is None else jnp.exp(jnp.sum(g, axis=1))
    if reset is not None:
        decay = jnp.where(jnp.any(reset, axis=1)[:, None, None], 0.0, decay)

    def join(before, share):
        decay, added = share
        return jax.tree.map(lambda s, new: decay[..., None] * s + new, before, added)

    first = init_state(config, q.shape[0]) if memory is None else memory
    after, before = join_shares(join, first, (decay, added))
    return after, read(before)[1]


def _gates(config, params, x, q):
    """Scaled queries, α [*B, H, M] and g, None without forgetting."""
    if isinstance(config, GSAConfig):
        # A slot is a mean of unit keys: unscaled scores would lie in [-1, 1] and hardly
        # choose.
        g = jax.nn.log_sigmoid(gates.linear_logits(x, params.forget)) / config.damping
        # expm1, because 1 - exp(g) cancels for gates near 1.
        return q * q.shape[-1] ** 0.5, -jnp.expm1(g), g
    # Each token is divided among the slots. Their sums of keys grow with the text, so
    # scores are scaled down as in attention.
    alpha = jax.nn.softmax(gates.linear_logits(x, params.target), axis=-1)
    return q * q.shape[-1] ** -0.5, alpha, None
