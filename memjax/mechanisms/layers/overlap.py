"""Step sizes of a chunk, bounded by the overlap of their keys.

    γ'_t = γ_t Π_s (1 - γ_s ⟨k_s, k_t⟩²)        s over the tokens of t's chunk before t

Where all gradients of a chunk are taken at one memory, n steps γ at one key correct its
prediction n times, and overshoot it. Of these steps the sum over a key that repeats is
1 - Π(1 - γ) <= 1, as the delta rule corrects token by token; a key that is
orthogonal to those before it keeps all of its γ.

Shapes: B batch, T time, H heads, K key, C chunk.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from memjax_kernels import overlap_with_keys
from memjax_kernels._src.common import chunks
from memjax_kernels._src.common.steps import open_chunk


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


def bounded_steps(
    opened: OpenChunk,
    position: Int[Array, " B"] | None,
    k: Float[Array, "B T H K"],
    gamma: Float[Array, "B T H"],
) -> tuple[Float[Array, "B H C"], Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """T tokens of `bounded_step`, chunk by chunk; k has the same values.

    `position` None is 0 for all, known before the program runs. Use the k that is
    returned: see `overlap_with_keys`.
    """
    time, size = gamma.shape[1], opened.steps.shape[-1]
    whole = OpenChunk(*(chunks.split(x, size, position) for x in (k, gamma)))
    keys, steps = open_chunk.put_in_front(whole, opened, position)

    def flat(x):
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    found = overlap_with_keys(flat(keys), flat(steps), chunk_size=size)
    of_chunks, left = found[0].reshape(keys.shape), found[1].reshape(steps.shape)
    # To shift tokens back costs more than to add gradients.
    k = chunks.join(of_chunks, time, None) if position is None else k
    after = open_chunk.last(steps, time, position)
    assert after is not None  # Chunks of one token have no bound.
    return after, k, chunks.join(steps * left, time, position)
