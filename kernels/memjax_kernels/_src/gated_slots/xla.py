"""Gated slots in chunks of matrix products: two linear recurrences in sequence.

The first computes K̃ q, and the second reads values with the softmax of that as queries.
There is a gate for each slot: in the first recurrence slots are the channels that are
read, in the second they are the key channels, as in gated linear attention.
Zhang et al. (2024), https://arxiv.org/abs/2409.07146, section 3.2.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import decays
from memjax_kernels._src.common.products import Multiply, multiplier, operand_dtype
from memjax_kernels._src.gated_slots.step import GatedSlotsState
from memjax_kernels._src.linear import chunks as linear_chunks


def advance_group(state, q, k, v, alpha, g, reset):
    """A group of chunks: (state, *tokens, reset) -> (state, y)."""
    left = decays.decays(g, reset, q.shape[-2])
    multiply = multiplier(operand_dtype(q, k, v, alpha))
    q, k, value, alpha = (x.astype(jnp.float32) for x in (q, k, v, alpha))
    keys, compared = compare(state.keys, q, k, alpha, left, multiply)
    # The softmax between the two linear recurrences needs all of the first.
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
