"""Mamba-2: linear attention with a decay per head and token.

    Δ_t = softplus(w x + b)        g_t = -exp(log A) Δ_t
    S_t = exp(g_t) S_{t-1} + k_t (Δ_t v_t)ᵀ        y_t = S_tᵀ q_t / √K + s v_t

Dao & Gu (2024), https://arxiv.org/abs/2405.21060, section 7 with C = q, B = k, X = v,
and its skip weight s (their D). It is initialised as there: A in [1, 16], Δ in
[0.001, 0.1]. Other than there, q and k are of unit norm and v is not convolved, as in
the block that all recurrent mechanisms share. With `RecurrentStyle(unit_norm=False)`,
as in published models, y has no 1/√K.

Shapes: B batch, T time, D model, H heads, G of keys, K key, V value.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from memjax.mechanisms.base import axes
from memjax.mechanisms.cells.base import Cell, bind
from memjax.mechanisms.layers import gates
from memjax.mechanisms.layers.divided_sequence import linear_share
from memjax.mechanisms.layers.gates import Gate
from memjax.mechanisms.layers.recurrent.block import RecurrentConfig
from memjax_kernels import ssd, ssd_init_state, ssd_step


@dataclasses.dataclass(frozen=True)
class Mamba2Config(RecurrentConfig):
    """Sizes of a layer of Mamba-2; see `RecurrentConfig`.

    Attributes:
        pace_limits: range that Δ is clipped to; None is none.
    """

    name: ClassVar[str] = "mamba2"

    pace_limits: tuple[float, float] | None = None

    def __post_init__(self):
        super().__post_init__()
        low, high = self.pace_limits or (0.0, 1.0)
        if not 0 <= low <= high:
            raise ValueError(
                f"pace_limits must be 0 <= low <= high, or None, got {self.pace_limits}"
            )

    @property
    def read_scale(self) -> float:
        """Of queries: 1/√K where they have unit norm."""
        return self.key_dim**-0.5 if self.style.unit_norm else 1.0

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
        params: "Mamba2Params",
        half_lives: tuple[float, float],
        constant: Float[Array, " D"],
    ) -> "Mamba2Params":
        """A decay of given half-lives, a head, and no skip; see `CellConfig`."""
        # The window has the tokens that the skip would pass on.
        return Mamba2Params(
            decay=decay_of_half_lives(params.decay, half_lives),
            skip=jnp.zeros_like(params.skip),
        )

    def cell_axes(self) -> PyTree:
        """Sharding axes of its parameters."""
        return AXES


class DecayParams(NamedTuple):
    """Decay of Mamba-2 and Gated DeltaNet."""

    pace: Gate
    log_rate: Float[Array, " H"]


DECAY_AXES = DecayParams(pace=gates.AXES, log_rate=axes())


class Mamba2Params(NamedTuple):
    """Learned gates."""

    decay: DecayParams
    skip: Float[Array, " H"]


AXES = Mamba2Params(decay=DECAY_AXES, skip=axes())


def init_params(config: Mamba2Config, key: PRNGKeyArray) -> Mamba2Params:
    """Draws the weights of the decay; the skip starts at 1."""
    return Mamba2Params(decay=init_decay(config, key), skip=jnp.ones(config.num_heads))


def init_state(config: Mamba2Config, batch: int) -> Float[Array, "B H K V"]:
    """The empty memory: zeros."""
    return ssd_init_state(batch, config.num_heads, config.key_dim, config.value_dim)


def step(
    config: Mamba2Config,
    params: Mamba2Params,
    memory: Float[Array, "B H K V"],
    q: Float[Array, "B G K"],
    k: Float[Array, "B G K"],
    v: Float[Array, "B H V"],
    x: Float[Array, "B D"],
) -> tuple[Float[Array, "B H K V"], Float[Array, "B H V"]]:
    """Writes one token and reads with its query."""
    pace, g = decay(params.decay, x, config.pace_limits)
    # The gate is float32 and would promote values of half precision.
    write = (v * pace[..., None]).astype(v.dtype)
    memory, y = ssd_step(q * config.read_scale, k, write, g, memory)
    # The skip weights v itself, not Δ v: it bypasses the memory.
    return memory, y + (params.skip[None, :, None] * v).astype(v.dtype)


def apply(
    config: Mamba2Config,
    params: Mamba2Params,
    memory: Float[Array, "B H K V"] | None,
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    x: Float[Array, "B T D"],
    reset: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """Equal to T steps, computed chunk by chunk."""
    pace, g = decay(params.decay, x, config.pace_limits)
    write = (v * pace[..., None]).astype(v.dtype)
    q = q * config.read_scale
    memory, y = ssd(
        q, k, write, g, memory, reset=reset, implementation=config.implementation
    )
    return memory, y + (params.skip[None, None, :, None] * v).astype(v.dtype)


def init_decay(config: RecurrentConfig, key: PRNGKeyArray) -> DecayParams:
    """Draws paces between 0.001 and 0.1, log-uniform, and rates between 1 and 16."""
    weight_key, pace_key, rate_key = jax.random.split(key, 3)
    heads = config.num_heads
    return DecayParams(
        pace=Gate(
            weight=gates.draw_weight(weight_key, config.model_dim, heads),
            bias=draw_pace_bias(pace_key, heads),
        ),
        log_rate=draw_rates(rate_key, heads),
    )


def draw_pace_bias(key: PRNGKeyArray, *shape: int) -> Float[Array, "..."]:
    """Biases of paces between 0.001 and 0.1, log-uniform."""
    low, high = jnp.log(0.001), jnp.log(0.1)
    # Log-uniform, so that short and long memories are equally likely.
    pace = jnp.exp(jax.random.uniform(key, shape, minval=low, maxval=high))
    # The inverse of softplus: Δ starts at the drawn pace.
    return jnp.log(jnp.expm1(pace))


def draw_rates(key: PRNGKeyArray, heads: int) -> Float[Array, " H"]:
    """Logs of rates between 1 and 16, so that a rate stays positive in training."""
    return jnp.log(jax.random.uniform(key, (heads,), minval=1.0, maxval=16.0))


def decay(
    params: DecayParams,
    x: Float[Array, "*B D"],
    limits: tuple[float, float] | None = None,
) -> tuple[Float[Array, "*B H"], Float[Array, "*B H"]]:
    """Δ > 0, clipped to the limits, and the log gate g < 0 of every token."""
    pace = jax.nn.softplus(gates.gate_logits(params.pace, x))
    if limits is not None:
        pace = jnp.clip(pace, *limits)
    # A file's bfloat16 would round the exponential.
    rate = jnp.exp(params.log_rate.astype(jnp.float32)).reshape(
        (1,) * (pace.ndim - 1) + (-1,)
    )
    return pace, -rate * pace


def decay_of_half_lives(
    params: DecayParams, half_lives: tuple[float, float]
) -> DecayParams:
    """A decay exp(-rate Δ) with Δ of about 1, by which Mamba-2 writes.

    Half-lives go from the first to the last head in geometric steps.
    """
    bias = jnp.full_like(params.pace.bias, np.log(np.e - 1))
    return DecayParams(
        pace=params.pace._replace(bias=bias),
        log_rate=half_life_rates(half_lives, len(params.log_rate)),
    )


def half_life_rates(half_lives: tuple[float, float], heads: int) -> Float[Array, " H"]:
    """Logs of rates, at a pace of 1, in geometric steps from the first head on."""
    rate = np.log(2) / np.geomspace(half_lives[0], half_lives[1], heads)
    return jnp.asarray(np.log(rate), jnp.float32)
