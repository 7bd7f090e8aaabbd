"""Step sizes of a chunk, bounded by the overlap of their keys, token by token.

    γ'_t = γ_t Π_s (1 - γ_s ⟨k_s, k_t⟩²)        s over the tokens of t's chunk before t

`memjax_kernels.trellis` computes them for a segment, with `bound_steps`. Where all
gradients of a chunk are taken at one memory, n steps γ at one key correct its
prediction n times, and overshoot it. Of these steps the sum over a key that repeats is
1 - Π(1 - γ) <= 1, as the delta rule corrects token by token; a key that is
orthogonal to those before it keeps all of its γ.

Shapes: B batch, H heads, K key, C chunk.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class OpenChunk(NamedTuple):
    """Keys and steps of the open chunk at their positions; zeros at later ones."""

    keys: Float[Array, "B H C K"]
    steps: Float[Array, "B H C"]


def bounded_step(
    opened: OpenChunk,
    position: Int[Array, " B"],
    k: Float[Array, "B H K"],
    gamma: Float[Array, "B H"],
) -> tuple[Float[Array, "B H C"], Float[Array, "B H"]]:
    """The steps of the chunk that is open after one more token, and its γ'."""
    alike = jnp.einsum("bhk,bhck->bhc", k.astype(jnp.float32), opened.keys) ** 2
    bounded = gamma * jnp.prod(1 - opened.steps * alike, axis=-1)
    size = opened.steps.shape[-1]
    here = (jnp.arange(size)[None] == position[:, None])[:, None]
    # After the last token of a chunk comes the start of the next.
    kept = (position + 1 < size)[:, None, None].astype(jnp.float32)
    return jnp.where(here, gamma[..., None], opened.steps) * kept, bounded
