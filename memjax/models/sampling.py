"""Sampling the next token from logits: temperature, top-k and top-p."""

import dataclasses

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


def draw(
    logits: Float[Array, "B V"], key: PRNGKeyArray, sampling: Sampling
) -> Int[Array, " B"]:
    """Draws one token for each batch element."""
    # The limit of a vanishing temperature; dividing by 0 would give NaN.
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        threshold = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
    if sampling.top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        cumulative = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1)
        # The token at which the sum reaches p is kept, so at least one token remains.
        last_kept = jnp.sum(cumulative < sampling.top_p, axis=-1, keepdims=True)
        threshold = jnp.take_along_axis(ordered, last_kept, axis=-1)
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
