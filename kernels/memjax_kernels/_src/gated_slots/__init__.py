"""Gated slot attention (GSA), and attention with bounded memory (ABC) without gates.

    K̃ ← diag(exp(g)) K̃ + α kᵀ      Ṽ ← diag(exp(g)) Ṽ + α vᵀ      y = Ṽᵀ softmax(K̃ q)

Zhang et al. (2024), https://arxiv.org/abs/2409.07146, section 3, which sets
α = 1 - exp(g); Peng et al. (2021), https://arxiv.org/abs/2110.02488, is g = None.
"""

from typing import Literal

from jaxtyping import Array, Bool, Float

from memjax_kernels._src.gated_slots import pallas_tpu, xla
from memjax_kernels._src.gated_slots.step import GatedSlotsState as GatedSlotsState
from memjax_kernels._src.gated_slots.step import (
    gated_slots_init_state as gated_slots_init_state,
)
from memjax_kernels._src.gated_slots.step import gated_slots_step as gated_slots_step
from memjax_kernels._src.linear.table import LinearOp, run

Implementation = Literal["reference", "xla", "pallas_tpu"]

_GATED_SLOTS = LinearOp(
    name="gated_slots",
    gates={"alpha": "B T H M", "g": "B T H M?"},
    step=gated_slots_step,
    advance=xla.advance_group,
    kernels=pallas_tpu.gated_slots_tpu,
    chunk_size=None,
    init_state=gated_slots_init_state,
    state={"state.keys": "B H M K", "state.values": "B H M V"},
    sizes="BHMKV",
    unsupported=pallas_tpu.unsupported,
)


def gated_slots(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    alpha: Float[Array, "B T H M"],
    g: Float[Array, "B T H M"] | None = None,
    state: GatedSlotsState | None = None,
    *,
    reset: Bool[Array, "B T"] | None = None,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[GatedSlotsState, Float[Array, "B T H V"]]:
    """Runs the recurrence over T tokens, T at least 1.

    Args:
        q: queries, not scaled here.
        k: keys.
        v: values.
        alpha: write weight of each slot.
        g: log of each slot's decay factor, in [-inf, 0]; inside jit the range is the
            caller's promise. None is no decay.
        state: the memory before the segment, float32; None is empty.
        reset: True empties the memory of a batch element before that token.
        chunk_size: tokens of a chunk of `xla`, a power of two; the result is the same.
            None is the fastest known. Kernels have chunks of 64.
        implementation: which code runs; None is the fastest that can.

    Returns:
        The memory after the segment, float32, and the read after each token's write,
        in the dtype of v.

    Raises:
        ValueError: on shapes or dtypes that do not fit, gates out of range, a state of
            another type, or an implementation that is unknown or cannot run here.
    """
    if not isinstance(state, GatedSlotsState | None):
        raise ValueError(
            f"state must be None or a GatedSlotsState, got {type(state).__name__}"
        )
    tokens = (q, k, v, alpha, g)
    return run(_GATED_SLOTS, tokens, state, reset, chunk_size, implementation)
