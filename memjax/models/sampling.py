"""Sampling the next token from logits: temperature, top-k and top-p."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings of the sampler.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token (greedy).
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: then keep the fewest likeliest tokens whose probabilities reach p, in
            (0, 1]; 1 keeps all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")


class Settings(NamedTuple):
    """`Sampling` as arrays: one program for all values."""

    temperature: Float[Array, ""]
    top_k: Int[Array, ""]
    top_p: Float[Array, ""]

    @classmethod
    def of(cls, sampling: Sampling) -> "Settings":
        """The settings of a sampler."""
        return cls(
            jnp.float32(sampling.temperature),
            jnp.int32(sampling.top_k),
            jnp.float32(sampling.top_p),
        )


def draw(
    logits: Float[Array, "B V"], key: PRNGKeyArray, settings: Settings
) -> Int[Array, " B"]:
    """Draws one token for each batch element."""

    def greedy():
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def sampled():
        limited = (settings.top_k > 0) | (settings.top_p < 1)
        scaled = logits / settings.temperature
        # Sorting the vocabulary is dear, so only where something is left out.
        kept = jax.lax.cond(
            limited, lambda x: _likeliest(x, settings), lambda x: x, scaled
        )
        return jax.random.categorical(key, kept, axis=-1).astype(jnp.int32)

    # The limit of a vanishing temperature; dividing by 0 would give NaN.
    return jax.lax.cond(settings.temperature == 0, greedy, sampled)


def _likeliest(logits, settings):
    """The logits of the top k, then of the top p; -inf elsewhere."""
    ordered = jnp.sort(logits, axis=-1, descending=True)
    last = jnp.where(settings.top_k > 0, settings.top_k, logits.shape[-1])
    last = jnp.minimum(last, logits.shape[-1]) - 1
    threshold = jax.lax.dynamic_slice_in_dim(ordered, last, 1, axis=-1)
    ordered = jnp.where(ordered < threshold, -jnp.inf, ordered)
    cumulative = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1)
    # The token at which the sum reaches p is kept, so at least one token remains. All
    # are for p = 1, which rounding keeps the sum below.
    below = (cumulative < settings.top_p) | (settings.top_p >= 1)
    last_kept = jnp.minimum(below.sum(axis=-1, keepdims=True), logits.shape[-1] - 1)
    threshold = jnp.maximum(threshold, jnp.take_along_axis(ordered, last_kept, axis=-1))
    return jnp.where(logits < threshold, -jnp.inf, logits)
