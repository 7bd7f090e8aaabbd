"""Delta rules with a decay for each key channel: KDA and Gated DeltaNet-2.

Kimi delta attention (KDA): Gated DeltaNet with a gate for each key channel, not one
for each head.

    g_t = -exp(log A) softplus(W₂ W₁ x + b)        S = diag(exp(g_t)) S_{t-1}
    S_t = S + β_t k_t (v_t - Sᵀ k_t)ᵀ              y_t = S_tᵀ q_t

Kimi Team (2025), https://arxiv.org/abs/2510.26692, equation 1: A of each head, W₁ as
wide as a head, b of each channel, initialised as in Mamba-2.

Gated DeltaNet-2 (GDN-2): an erase gate e for each key channel and a write gate w for
each value channel, in the place of β.

    S_t = S + k_t (w_t ∘ v_t - Sᵀ (e_t ∘ k_t))ᵀ        e_t, w_t = sigmoid(W x)

Its equation and layer are those of https://github.com/NVlabs/GatedDeltaNet-2.

`kda_style` is the published block around both memories.

Shapes: B batch, T time, D model, H heads, G of keys, K key, V value, R rank.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from memjax.checks import check_sizes
from memjax.mechanisms.base import axes
from memjax.mechanisms.cells.base import Cell, bind
from memjax.mechanisms.deltanet import DeltaRuleConfig, write_rates
from memjax.mechanisms.layers import gates
from memjax.mechanisms.layers.divided_sequence import linear_share
from memjax.mechanisms.layers.recurrent.style import RecurrentStyle
from memjax.mechanisms.mamba2 import draw_pace_bias, draw_rates, half_life_rates
from memjax_kernels import Decay, gdn2, gdn2_step, kda, kda_init_state, kda_step


@dataclasses.dataclass(frozen=True)
class KDAConfig(DeltaRuleConfig):
    """Sizes of a layer of Kimi delta attention; see `DeltaRuleConfig`.

    Attributes:
        decay_rank: R, width between the two matrices of the decay; None is `value_dim`.
    """

    name: ClassVar[str] = "kda"
    #: Whether erasing and writing have gates of each channel, as in GDN-2.
    channel_rates: ClassVar[bool] = False

    decay_rank: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.decay_rank is not None:
            check_sizes(decay_rank=self.decay_rank)

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

    def with_half_lives(
        self,
        params: "KDAParams",
        half_lives: tuple[float, float],
        constant: Float[Array, " D"],
    ) -> "KDAParams":
        """A decay of given half-lives, a head; see `CellConfig`."""
        # Of paces of about 1, whose logits the weights change by little.
        bias = jnp.full_like(params.bias, np.log(np.e - 1))
        rates = half_life_rates(half_lives, self.num_heads)
        return params._replace(bias=bias, log_rate=rates)

    def cell_axes(self) -> PyTree:
        """Sharding axes of its parameters."""
        return KDAParams(
            rate=axes("model", "heads"),
            narrow=axes("model"),
            widen=axes(None, "heads"),
            bias=axes("heads"),
            log_rate=axes(),
            write=axes("model", "heads") if self.channel_rates else None,
        )


@dataclasses.dataclass(frozen=True)
class GDN2Config(KDAConfig):
    """Sizes of a layer of Gated DeltaNet-2; see `KDAConfig`. `max_rate` bounds e."""

    name: ClassVar[str] = "gdn2"
    channel_rates: ClassVar[bool] = True


def kda_style(key_dim: int, value_dim: int) -> RecurrentStyle:
    """The published block, as `style=`: convolved values, an output gate of low rank.

    Raises:
        ValueError: on a width below 1.
    """
    check_sizes(key_dim=key_dim, value_dim=value_dim)
    return RecurrentStyle(
        conv_value=True,
        query_scale=key_dim**-0.5,
        gate="sigmoid",
        gate_rank=value_dim,
    )


class KDAParams(NamedTuple):
    """Learned gates: `rate` makes β, or e of GDN-2; `write` makes w, GDN-2 alone."""

    rate: Float[Array, "D H *K"]
    narrow: Float[Array, "D R"]
    widen: Float[Array, "R H K"]
    bias: Float[Array, "H K"]
    log_rate: Float[Array, " H"]
    write: Float[Array, "D H V"] | None = None


def init_params(config: KDAConfig, key: PRNGKeyArray) -> KDAParams:
    """Draws the weights of the gates; biases and rates of the decay as Mamba-2's."""
    keys = jax.random.split(key, 6)
    d, h, k, v = config.model_dim, config.num_heads, config.key_dim, config.value_dim
    rank = config.decay_rank or v
    channels = (k,) if config.channel_rates else ()
    return KDAParams(
        rate=gates.draw_weight(keys[0], d, h, *channels),
        narrow=gates.draw_weight(keys[1], d, rank),
        widen=gates.draw_weight(keys[2], rank, h, k),
        bias=draw_pace_bias(keys[3], h, k),
        log_rate=draw_rates(keys[4], h),
        write=gates.draw_weight(keys[5], d, h, v) if config.channel_rates else None,
    )


def init_state(config: KDAConfig, batch: int) -> Float[Array, "B H K V"]:
    """The empty memory: zeros."""
    return kda_init_state(batch, config.num_heads, config.key_dim, config.value_dim)


def step(
    config: KDAConfig,
    params: KDAParams,
    memory: Float[Array, "B H K V"],
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    x: Float[Array, "B D"],
) -> tuple[Float[Array, "B H K V"], Float[Array, "B H V"]]:
    """Writes one token and reads with its query."""
    op: Callable[..., Any] = gdn2_step if config.channel_rates else kda_step
    rates = _rates(config, params, x)
    return op(q, k, v, *rates, log_decays(params, x), memory)


def apply(
    config: KDAConfig,
    params: KDAParams,
    memory: Float[Array, "B H K V"] | None,
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    x: Float[Array, "B T D"],
    reset: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """Equal to T steps, computed chunk by chunk."""
    op: Callable[..., Any] = gdn2 if config.channel_rates else kda
    rates = _rates(config, params, x)
    # The product was rounded to the dtype of the tokens.
    logits = _logits(params, x).astype(x.dtype)
    return op(
        *(q, k, v, *rates, logits, memory),
        reset=reset,
        implementation=config.implementation,
        decay=Decay(params.log_rate, params.bias),
    )


def _rates(config, params, x):
    """β, or e and w, float32."""
    rates = (write_rates(config, params.rate, x),)
    if params.write is not None:
        rates += (jax.nn.sigmoid(gates.linear_logits(x, params.write)),)
    return rates


def _logits(params, x):
    return gates.low_rank_logits(x, params.narrow, params.widen)


def log_decays(params: KDAParams, x: Float[Array, "*B D"]) -> Float[Array, "*B H K"]:
    """The log gates g < 0 of every token."""
    return Decay(params.log_rate, params.bias).log_gates(_logits(params, x))
