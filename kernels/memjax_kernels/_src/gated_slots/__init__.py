"""Gated slot attention (GSA), and attention with bounded memory (ABC) without gates.

    K̃ ← diag(exp(g)) K̃ + α kᵀ      Ṽ ← diag(exp(g)) Ṽ + α vᵀ      y = Ṽᵀ softmax(K̃ q)

Zhang et al. (2024), https://arxiv.org/abs/2409.07146, section 3, which sets
α = 1 - exp(g); Peng et al. (2021), https://arxiv.org/abs/2110.02488, is g = None.
"""

from typing import Literal

from jaxtyping import Array, Bool, Float

from memjax_kernels._src.gated_slots import pallas_tpu, xla
from memjax_kernels._src.gated_slots.step import (
    GatedSlotsState,
    gated_slots_init_state,
    gated_slots_step,
)
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
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
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

    Other arguments, results and errors are those of `linear_attention`.

    Args:
        alpha: write weight of each slot.
        g: log of each slot's decay factor, in [-inf, 0]; inside jit the range is the
            caller's promise. None is no decay.
    """
    if not isinstance(state, GatedSlotsState | None):
        raise ValueError(
            f"state must be None or a GatedSlotsState, got {type(state).__name__}"
        )
    tokens = (q, k, v, alpha, g)
    return run(_GATED_SLOTS, tokens, state, reset, chunk_size, implementation)
