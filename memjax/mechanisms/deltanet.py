"""DeltaNet: fast weights corrected by their own prediction error.

    S_t = S_{t-1} + β_t k_t (v_t - S_{t-1}ᵀ k_t)ᵀ        y_t = S_tᵀ q_t

Schlag, Irie & Schmidhuber (2021), https://arxiv.org/abs/2102.11174, eq. 24; Yang et
al. (2024), https://arxiv.org/abs/2406.06484, whose layer this is: unit q and k, no
scale, β = sigmoid(w x), here times `max_rate`.

Shapes: B batch, T time, D model, H heads, G of keys, K key, V value.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from memjax.checks import check_positive
from memjax.mechanisms.base import axes
from memjax.mechanisms.cells.base import Cell, bind
from memjax.mechanisms.layers import gates
from memjax.mechanisms.layers.divided_sequence import linear_share
from memjax.mechanisms.layers.recurrent.block import RecurrentConfig
from memjax_kernels import delta_rule, delta_rule_init_state, delta_rule_step


@dataclasses.dataclass(frozen=True)
class DeltaRuleConfig(RecurrentConfig):
    """Sizes that DeltaNet and Gated DeltaNet share; see `RecurrentConfig`.

    Attributes:
        max_rate: largest β, in (0, 2]. Above 1 a write can turn a memory's sign
            (Grazzi et al. 2024, https://arxiv.org/abs/2411.12537).
    """

    name: ClassVar[str]

    max_rate: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        check_positive(most=2.0, max_rate=self.max_rate)


def write_rates(
    config: DeltaRuleConfig, weight: Float[Array, "D H ..."], x: Float[Array, "*B D"]
) -> Array:
    """β [*B, H, ...] of every token, of each head or of each channel."""
    rates = jax.nn.sigmoid(gates.linear_logits(x, weight))
    return rates if config.max_rate == 1 else config.max_rate * rates


@dataclasses.dataclass(frozen=True)
class DeltaNetConfig(DeltaRuleConfig):
    """Sizes of a layer of DeltaNet; see `DeltaRuleConfig`."""

    name: ClassVar[str] = "deltanet"

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


class DeltaNetParams(NamedTuple):
    """Learned gates."""

    rate: Float[Array, "D H"]


AXES = DeltaNetParams(rate=axes("model", "heads"))


def init_params(config: DeltaNetConfig, key: PRNGKeyArray) -> DeltaNetParams:
    """Draws the weights of β."""
    return DeltaNetParams(gates.draw_weight(key, config.model_dim, config.num_heads))


def init_state(config: DeltaNetConfig, batch: int) -> Float[Array, "B H K V"]:
    """The empty memory: zeros."""
    return delta_rule_init_state(
        batch, config.num_heads, config.key_dim, config.value_dim
    )


def step(
    config: DeltaNetConfig,
    params: DeltaNetParams,
    memory: Float[Array, "B H K V"],
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    x: Float[Array, "B D"],
) -> tuple[Float[Array, "B H K V"], Float[Array, "B H V"]]:
    """Writes one token and reads with its query."""
    # k has unit norm, so that β in (0, 1) moves the prediction towards v and never past
    # it.
    beta = write_rates(config, params.rate, x)
    return delta_rule_step(q, k, v, beta, memory)


def apply(
    config: DeltaNetConfig,
    params: DeltaNetParams,
    memory: Float[Array, "B H K V"] | None,
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    x: Float[Array, "B T D"],
    reset: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """Equal to T steps, computed chunk by chunk."""
    beta = write_rates(config, params.rate, x)
    return delta_rule(
        q, k, v, beta, memory, reset=reset, implementation=config.implementation
    )
