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


class OpenChunk(NamedTuple):
    """Keys and steps of the open chunk at their positions; zeros at later ones."""

    keys: Float[Array, "B C H K"]
    steps: Float[Array, "B C H"]


def empty_chunk(batch: int, chunk_size: int, heads: int, width: int) -> OpenChunk:
    """A chunk without tokens."""
    keys = jnp.zeros((batch, chunk_size, heads, width), jnp.float32)
    return OpenChunk(keys, jnp.zeros((batch, chunk_size, heads), jnp.float32))


def bounded_step(
    open_chunk: OpenChunk,
    position: Int[Array, " B"],
    k: Float[Array, "B H K"],
    gamma: Float[Array, "B H"],
) -> tuple[OpenChunk, Float[Array, "B H K"], Float[Array, "B H"]]:
    """The open chunk with one more token, its k unchanged, and its γ'."""
    key = k.astype(jnp.float32)
    alike = jnp.einsum("bhk,bchk->bch", key, open_chunk.keys) ** 2
    bounded = gamma * jnp.prod(1 - open_chunk.steps * alike, axis=1)
    size = open_chunk.steps.shape[1]
    here = (jnp.arange(size)[None] == position[:, None])[..., None]
    # After the last token of a chunk comes the start of the next.
    kept = ((position + 1) % size != 0)[:, None, None].astype(jnp.float32)
    steps = jnp.where(here, gamma[:, None], open_chunk.steps) * kept
    keys = jnp.where(here[..., None], key[:, None], open_chunk.keys) * kept[..., None]
    return OpenChunk(keys, steps), k, bounded


def bounded_steps(
    open_chunk: OpenChunk,
    position: Int[Array, " B"] | None,
    k: Float[Array, "B T H K"],
    gamma: Float[Array, "B T H"],
) -> tuple[OpenChunk, Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """T tokens of `bounded_step`, chunk by chunk; k has the same values.

    `position` None is 0 for all, known before the program runs. Use the k that is
    returned: see `overlap_with_keys`.
    """
    time, size = gamma.shape[1], open_chunk.steps.shape[1]
    keys = chunks.split(k, size, position)
    steps = chunks.split(gamma, size, position)
    if position is not None:
        # Tokens of an earlier call are zeros here.
        keys = keys.at[:, 0].add(open_chunk.keys.astype(k.dtype))
        steps = steps.at[:, 0].add(open_chunk.steps)

    def flat(x):
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    found = overlap_with_keys(flat(keys), flat(steps), chunk_size=size)
    of_chunks, left = found[0].reshape(keys.shape), found[1].reshape(steps.shape)
    end = jnp.full(k.shape[0], time) if position is None else position + time
    open_chunk = _last_chunk(keys.astype(jnp.float32), steps, end)
    # To shift tokens back costs more than to add gradients.
    k = chunks.join(of_chunks, time, None) if position is None else k
    return open_chunk, k, chunks.join(steps * left, time, position)


def _last_chunk(keys, steps, end):
    """The chunk of token `end`: zeros where it begins one."""
    number, size = steps.shape[1:3]
    # A chunk behind the last holds nothing.
    keys, steps = (
        jnp.concatenate([x, jnp.zeros_like(x[:, :1])], axis=1) for x in (keys, steps)
    )
    at = jnp.minimum(end // size, number)[:, None, None, None]

    def pick(x, at):
        return jnp.take_along_axis(x, at, axis=1)[:, 0]

    return OpenChunk(pick(keys, at[..., None]), pick(steps, at))
