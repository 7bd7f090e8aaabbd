"""Gated slots in chunks of matrix products: two linear recurrences in sequence.

The first computes K̃ q, and the second reads values with the softmax of that as queries.
There is a gate for each slot: in the first recurrence slots are the channels that are
read, in the second they are the key channels, as in gated linear attention.
Zhang et al. (2024), https://arxiv.org/abs/2409.07146, section 3.2.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import decays
from memjax_kernels._src.common.products import Multiply, multiplier, operand_dtype
from memjax_kernels._src.gated_slots.reference import GatedSlotsState
from memjax_kernels._src.linear import chunks as linear_chunks

CHUNK_SIZE = 32


def gated_slots_xla(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    alpha: Float[Array, "B T H M"],
    g: Float[Array, "B T H M"] | None,
    state: GatedSlotsState,
    reset: Bool[Array, "B T"] | None = None,
    *,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[GatedSlotsState, Float[Array, "B T H V"]]:
    """The recurrence of `gated_slots_reference`."""
    tokens = (q, k, v, alpha, g)
    return linear_chunks.scan_groups(_advance_group, tokens, state, reset, chunk_size)


def _advance_group(state, q, k, v, alpha, g, reset):
    left = decays.decays(g, reset, q.shape[-2])
    multiply = multiplier(operand_dtype(q, k, v, alpha))
    q, k, value, alpha = (x.astype(jnp.float32) for x in (q, k, v, alpha))
    keys, compared = compare(state.keys, q, k, alpha, left, multiply)
    # The softmax stands between two linear recurrences, and needs all of the first.
    values, y = linear_chunks.linear_reads(
        state.values, jax.nn.softmax(compared), alpha, value, left, multiply
    )
    return GatedSlotsState(keys=keys, values=values), y.astype(v.dtype)


def compare(
    keys: Float[Array, "B H M K"],
    q: Float[Array, "n B H C K"],
    k: Float[Array, "n B H C K"],
    alpha: Float[Array, "n B H C M"],
    left: decays.Decays,
    multiply: Multiply,
) -> tuple[Float[Array, "B H M K"], Float[Array, "n B H C M"]]:
    """The slots' keys after the group, and K̃ q for every token, [n, B, H, C, M]."""
    written = multiply(alpha * left.until, k, "tn")
    keys, starts = linear_chunks.carry(keys, left.since[..., -1, :], written)
    # Gates are of slots, which are the channels read here: inside a chunk q k is plain.
    inside = multiply(q, k, "nt")
    before = multiply(q, starts, "nt")
    new = decays.sums(inside, alpha, left, multiply)
    return keys, new + left.since * before
