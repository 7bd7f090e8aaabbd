"""Rotary positions (RoPE), plain and extended to longer sequences.

Su et al. (2021), https://arxiv.org/abs/2104.09864, in the half-split layout of Llama:
channels i and i + K/2 of a head turn together by position * f_i, f_i = θ^(-2i/K).
A checkpoint extended beyond its training length has some f_i scaled down.
"""

import dataclasses
import math
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import memjax_kernels
from memjax.checks import check_numbers, check_positive, check_sizes
from memjax.mechanisms.layers.norms import expand_leading_dims

ScalingKind = Literal["linear", "llama3", "yarn"]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of RoPE's frequencies for longer texts, as in a checkpoint's config.

    Attributes:
        kind: "linear" divides all by `factor` (Chen et al. 2023,
            https://arxiv.org/abs/2306.15595); "llama3" only those that turn fewer
            than `low_frequency_factor` times in `original_positions`, and by degrees
            those up to `high_frequency_factor` times (Llama 3.1); "yarn" likewise by
            channel between `beta_slow` and `beta_fast` turns (Peng et al. 2023,
            https://arxiv.org/abs/2309.00071).
        factor: by how much, in [1, 2**31].
        low_frequency_factor: "llama3" alone.
        high_frequency_factor: "llama3" alone; above the low one.
        original_positions: length of the texts before; "llama3" and "yarn".
        beta_fast: "yarn" alone.
        beta_slow: "yarn" alone; at most `beta_fast`.
        attention_factor: of queries and keys, "yarn" alone; None is 0.1 ln(factor) + 1.
    """

    kind: ScalingKind
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self):
        if self.kind not in get_args(ScalingKind):
            raise ValueError(
                f"rope scaling must be one of {get_args(ScalingKind)}, "
                f"got {self.kind!r}"
            )
        check_numbers(
            **{
                name: value
                for name, value in vars(self).items()
                if name not in ("kind", "original_positions") and value is not None
            }
        )
        # Positions are int32: a larger factor would make them all alike.
        if not 1 <= self.factor <= 2**31:
            raise ValueError(f"factor must be in [1, 2**31], got {self.factor}")
        check_sizes(original_positions=self.original_positions)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        if not 0 < low < high:
            raise ValueError(
                "high_frequency_factor must be above low_frequency_factor, both "
                f"positive, got {high} and {low}"
            )
        if not 0 < self.beta_slow <= self.beta_fast:
            raise ValueError(
                "beta_fast must be at least beta_slow, both positive, got "
                f"{self.beta_fast} and {self.beta_slow}"
            )
        check_positive(high_frequency_factor=high, beta_fast=self.beta_fast)
        if self.attention_factor is not None:
            check_positive(attention_factor=self.attention_factor)

    @property
    def amplitude(self) -> float:
        """Factor of the turned queries and keys."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is None:
            return 0.1 * math.log(self.factor) + 1.0
        return self.attention_factor


def frequencies(
    width: int, theta: float, scaling: RopeScaling | None
) -> Float[np.ndarray, " half"]:
    """Angles that each pair of channels turns by a position, in float32."""
    half = width // 2
    plain = (theta ** (-np.arange(half) / half)).astype(np.float32)
    if scaling is None:
        return plain
    slow = plain / np.float32(scaling.factor)
    if scaling.kind == "linear":
        return slow
    if scaling.kind == "llama3":
        # Channels that turned often in the original length are kept: they tell near
        # positions apart.
        turns = scaling.original_positions * plain / (2 * np.pi)
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        kept = np.clip((turns - low) / (high - low), 0, 1)
    else:
        kept = 1 - _yarn_ramp(width, theta, scaling)
    return ((1 - kept) * slow + kept * plain).astype(np.float32)


def _yarn_ramp(width: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """0 at the channels that turn beta_fast times or more, 1 from beta_slow on."""

    def channel(turns):
        return (
            width
            * math.log(scaling.original_positions / (turns * 2 * math.pi))
            / (2 * math.log(theta))
        )

    first = max(math.floor(channel(scaling.beta_fast)), 0)
    last = min(math.ceil(channel(scaling.beta_slow)), width - 1)
    # A ramp of no length is a step.
    length = last - first if last != first else 1e-3
    return np.clip((np.arange(width // 2) - first) / length, 0, 1)


def tables(
    width: int,
    positions: Int[Array, "*P T"],
    theta: float,
    scaling: RopeScaling | None = None,
) -> tuple[Float[Array, "*P T half"], Float[Array, "*P T half"]]:
    """Cosine and sine of the angle of each pair of channels, in float32.

    Angles are taken modulo a full turn before they are rounded: they are as good at
    position 2**30 as at 0, and a difference of positions is the same anywhere.
    """
    # Constants of the program, computed in numpy at trace time.
    turns = frequencies(width, theta, scaling).astype(np.float64) * (2**32 / math.tau)
    whole = np.rint(turns)
    at = positions[..., None].astype(jnp.int32)
    # In 2**-32 of a turn: the product wraps where the angle does.
    wrapped = at * expand_leading_dims(jnp.asarray(whole, jnp.int32), at)
    rest = at.astype(jnp.float32) * expand_leading_dims(
        jnp.asarray(turns - whole, jnp.float32), at
    )
    angles = (wrapped.astype(jnp.float32) + rest) * np.float32(math.tau / 2**32)
    amplitude = 1.0 if scaling is None else scaling.amplitude
    return jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude


def rotate(
    x: Float[Array, "*B T H K"],
    positions: Int[Array, "*P T"],
    theta: float,
    scaling: RopeScaling | None = None,
) -> Float[Array, "*B T H K"]:
    """Turns each pair of channels (i, i + K/2) by its position.

    Angles are exact to float32; the result has the dtype of x.
    """
    # All heads turn alike.
    return memjax_kernels.rotate(x, *tables(x.shape[-1], positions, theta, scaling))
