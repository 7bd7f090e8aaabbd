"""Batch elements of different lengths in one call.

Shapes: B batch, T time, D model.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from memjax.mechanisms.base import Mechanism, refuse_mask, replace_rows

# Tokens a chunk, where a mechanism compresses them.
RAGGED_CHUNK = 64


def apply_ragged(
    mechanism: Mechanism,
    params: PyTree,
    state: PyTree,
    x: Float[Array, "B T D"],
    mask: Bool[Array, "B T"] | None,
    lengths: Int[Array, " B"],
) -> tuple[PyTree, Float[Array, "B T D"]]:
    """Reads the first `lengths[b]` tokens, 0 to T, of batch element b.

    See `ApplyMasked`. Only mechanisms that have `apply_masked` take a mask.

    Returns:
        The state after them, and outputs, undefined behind them.
    """
    if mechanism.apply_masked is not None:
        return mechanism.apply_masked(params, state, x, mask, lengths)

    refuse_mask(mask)
    length = x.shape[1]
    size = min(RAGGED_CHUNK, length)
    padded = jnp.pad(x, ((0, 0), (0, -length % size), (0, 0)))
    chunks = jnp.moveaxis(padded.reshape(x.shape[0], -1, size, x.shape[2]), 1, 0)
    ends = size * (1 + jnp.arange(len(chunks), dtype=lengths.dtype))

    def read_chunk(state, chunk):
        end, x = chunk
        after, y = mechanism.apply(params, state, x)
        # Nothing reads ahead, so that outputs are right up to the padding; states with
        # padding in them are dropped.
        return replace_rows(after, state, end > lengths), y

    # The rest, less than a chunk, goes token by token from each row's own position.
    def read_token(state, t):
        at = jnp.minimum(whole + t, length - 1)
        token = jax.vmap(lambda x, at: x[at])(x, at)
        after, _ = mechanism.step(params, state, token)
        return replace_rows(after, state, whole + t >= lengths), None

    whole = lengths // size * size
    state, y = jax.lax.scan(read_chunk, state, (ends, chunks))
    state, _ = jax.lax.scan(read_token, state, jnp.arange(size - 1))
    y = jnp.moveaxis(y, 0, 1).reshape(*padded.shape[:2], -1)
    return state, y[:, :length]
