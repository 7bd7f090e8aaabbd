"""Gated DeltaNet: the delta rule on a decaying memory.

    S = exp(g_t) S_{t-1}        S_t = S + β_t k_t (v_t - Sᵀ k_t)ᵀ        y_t = S_tᵀ q_t

Yang, Kautz & Hatamizadeh (2024), https://arxiv.org/abs/2412.06464, eq. 10: β as in
DeltaNet, g as in Mamba-2, unit q and k without a scale.

Shapes: B batch, T time, D model, H heads, G of keys, K key, V value.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from memjax.mechanisms.base import axes
from memjax.mechanisms.cells.base import Cell, bind
from memjax.mechanisms.deltanet import DeltaRuleConfig, write_rates
from memjax.mechanisms.layers import gates
from memjax.mechanisms.layers.divided_sequence import linear_share
from memjax.mechanisms.layers.recurrent.projections import Unconvolved
from memjax.mechanisms.mamba2 import (
    DECAY_AXES,
    DecayParams,
    decay,
    decay_of_half_lives,
    init_decay,
)
from memjax_kernels import (
    Decay,
    convolved_gated_delta_rule,
    gated_delta_rule,
    gated_delta_rule_init_state,
    gated_delta_rule_step,
)


@dataclasses.dataclass(frozen=True)
class GatedDeltaNetConfig(DeltaRuleConfig):
    """Sizes of a layer of Gated DeltaNet; see `DeltaRuleConfig`."""

    name: ClassVar[str] = "gated_deltanet"

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
            # One kernel on a TPU, if no other implementation is asked for.
            convolved=convolved if self.implementation is None else None,
        )

    def with_half_lives(
        self,
        params: "GatedDeltaNetParams",
        half_lives: tuple[float, float],
        constant: Float[Array, " D"],
    ) -> "GatedDeltaNetParams":
        """A decay of given half-lives, a head; see `CellConfig`."""
        return params._replace(decay=decay_of_half_lives(params.decay, half_lives))

    def cell_axes(self) -> PyTree:
        """Sharding axes of its parameters."""
        return AXES


class GatedDeltaNetParams(NamedTuple):
    """Learned gates."""

    rate: Float[Array, "D H"]
    decay: DecayParams


AXES = GatedDeltaNetParams(rate=axes("model", "heads"), decay=DECAY_AXES)


def init_params(config: GatedDeltaNetConfig, key: PRNGKeyArray) -> GatedDeltaNetParams:
    """Draws the weights of β and of g."""
    rate_key, decay_key = jax.random.split(key)
    return GatedDeltaNetParams(
        rate=gates.draw_weight(rate_key, config.model_dim, config.num_heads),
        decay=init_decay(config, decay_key),
    )


def init_state(config: GatedDeltaNetConfig, batch: int) -> Float[Array, "B H K V"]:
    """The empty memory: zeros."""
    return gated_delta_rule_init_state(
        batch, config.num_heads, config.key_dim, config.value_dim
    )


def step(
    config: GatedDeltaNetConfig,
    params: GatedDeltaNetParams,
    memory: Float[Array, "B H K V"],
    q: Float[Array, "B G K"],
    k: Float[Array, "B G K"],
    v: Float[Array, "B H V"],
    x: Float[Array, "B D"],
) -> tuple[Float[Array, "B H K V"], Float[Array, "B H V"]]:
    """Writes one token and reads with its query."""
    beta = write_rates(config, params.rate, x)
    # Mamba-2's Δ enters through the decay alone: β is the size of the write.
    _, g = decay(params.decay, x)
    return gated_delta_rule_step(q, k, v, beta, g, memory)


def apply(
    config: GatedDeltaNetConfig,
    params: GatedDeltaNetParams,
    memory: Float[Array, "B H K V"] | None,
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    x: Float[Array, "B T D"],
    reset: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """Equal to T steps, computed chunk by chunk."""
    beta = write_rates(config, params.rate, x)
    _, g = decay(params.decay, x)
    return gated_delta_rule(
        q, k, v, beta, g, memory, reset=reset, implementation=config.implementation
    )


def convolved(
    config: GatedDeltaNetConfig,
    params: GatedDeltaNetParams,
    memory: Float[Array, "B H K V"] | None,
    given: Unconvolved,
    x: Float[Array, "B T D"],
    reset: Bool[Array, "B T"] | None = None,
) -> tuple[
    Float[Array, "B H K V"], tuple[Array, Array, Array], Float[Array, "B T H V"]
]:
    """`apply` of what is not convolved yet, and the last inputs of the convolutions."""
    pace = params.decay.pace
    return convolved_gated_delta_rule(
        *given[:3],
        gates.linear_logits(x, params.rate),
        gates.linear_logits(x, pace.weight),
        Decay(params.decay.log_rate, pace.bias),
        memory,
        biases=given.biases,
        reset=reset,
        scale=config.style.query_scale,
        max_rate=config.max_rate,
    )
