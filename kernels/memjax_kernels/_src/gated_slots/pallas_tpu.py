"""Gated slots on a TPU: one kernel for the weights, GLA's for the reads."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import decays
from memjax_kernels._src.common.packs import recurrence
from memjax_kernels._src.common.packs.recurrence_chunk import Op
from memjax_kernels._src.common.products import multiplier, operand_dtype
from memjax_kernels._src.gated_slots import packed
from memjax_kernels._src.gated_slots.step import GatedSlotsState
from memjax_kernels._src.gated_slots.xla import compare
from memjax_kernels._src.linear.chunks import scan_groups
from memjax_kernels._src.linear.pallas_tpu import gla_tpu


def unsupported(q: Array, k: Array, v: Array, alpha: Array, g: Array | None) -> str:
    """Why the kernels cannot take these arguments on any TPU; "" if they can."""
    del g
    reason = recurrence.unsupported(q, k, alpha)
    return reason or recurrence.unsupported(alpha, alpha, v)


def gated_slots_tpu(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    alpha: Float[Array, "B T H M"],
    g: Float[Array, "B T H M"] | None,
    state: GatedSlotsState,
    reset: Bool[Array, "B T"] | None = None,
    *,
    interpret: Any = False,
) -> tuple[GatedSlotsState, Float[Array, "B T H V"]]:
    """The recurrence of `gated_slots` in kernels for a TPU."""
    g = jnp.zeros(alpha.shape, jnp.float32) if g is None else g
    keys = state.keys.swapaxes(2, 3)
    keys, weights = recurrence.recur(
        OP, ("g",), q, k, alpha, g, keys, reset, interpret=interpret
    )
    values, y = gla_tpu(weights, alpha, v, g, state.values, reset, interpret=interpret)
    return GatedSlotsState(keys=keys.swapaxes(2, 3), values=values), y


def _in_xla(q, k, alpha, g, beta, state, *, chunk_size):
    del beta

    def advance(state, q, k, alpha, g, reset):
        left = decays.decays(g, reset, q.shape[-2])
        multiply = multiplier(operand_dtype(q, k, alpha))
        q, k, write = (x.astype(jnp.float32) for x in (q, k, alpha))
        state, compared = compare(state, q, k, write, left, multiply)
        return state, jax.nn.softmax(compared).astype(alpha.dtype)

    keys = state.swapaxes(2, 3)
    keys, weights = scan_groups(advance, (q, k, alpha, g), keys, None, chunk_size)
    return keys.swapaxes(2, 3), weights


OP = Op("slot_weights", packed.advance, packed.vjp, _in_xla, exact=False)
