"""Slots that are written softly and read by softmax: GSA, and ABC without gates.

    K̃ ← diag(exp(g)) K̃ + α kᵀ      Ṽ ← diag(exp(g)) Ṽ + α vᵀ      y = Ṽᵀ softmax(K̃ q)

Zhang et al. (2024), https://arxiv.org/abs/2409.07146, section 3, which sets
α = 1 - exp(g); Peng et al. (2021), https://arxiv.org/abs/2110.02488, is g = None.
"""

from typing import Literal

from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import arguments, implementations
from memjax_kernels._src.gated_slots import pallas_tpu
from memjax_kernels._src.gated_slots.reference import GatedSlotsState as GatedSlotsState
from memjax_kernels._src.gated_slots.reference import (
    gated_slots_init_state as gated_slots_init_state,
)
from memjax_kernels._src.gated_slots.reference import gated_slots_reference
from memjax_kernels._src.gated_slots.reference import (
    gated_slots_step as gated_slots_step,
)
from memjax_kernels._src.gated_slots.xla import gated_slots_xla

Implementation = Literal["reference", "xla", "pallas_tpu"]


def gated_slots(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    alpha: Float[Array, "B T H M"],
    g: Float[Array, "B T H M"] | None = None,
    state: GatedSlotsState | None = None,
    *,
    reset: Bool[Array, "B T"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[GatedSlotsState, Float[Array, "B T H V"]]:
    """Runs the recurrence over T tokens, T at least 1.

    Args:
        q: queries, not scaled here.
        k: keys.
        v: values.
        alpha: how much of a token each slot takes.
        g: log of the share that each slot keeps, in [-inf, 0]; inside jit the range is
            the caller's promise. None keeps all.
        state: the memory before the segment, float32; None is empty.
        reset: True empties the memory of a batch element before that token.
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
    keys, values = (None, None) if state is None else state
    sizes = arguments.check_shapes(
        **{
            "q": (q, "B T H K"),
            "k": (k, "B T H K"),
            "v": (v, "B T H V"),
            "alpha": (alpha, "B T H M"),
            "g": (g, "B T H M"),
            "state.keys": (keys, "B H M K"),
            "state.values": (values, "B H M V"),
        }
    )
    arguments.check_float32("state.keys", keys)
    arguments.check_float32("state.values", values)
    arguments.check_range("g", g, -float("inf"), 0.0)
    arguments.check_mask("reset", reset, sizes["B"], sizes["T"])
    if state is None:
        state = gated_slots_init_state(*(sizes[letter] for letter in "BHMKV"))
    form = implementations.choose(
        "gated_slots",
        implementation,
        {
            "xla": gated_slots_xla,
            "reference": gated_slots_reference,
            "pallas_tpu": pallas_tpu.gated_slots_tpu,
        },
        {"pallas_tpu": pallas_tpu.unsupported(q, k, v, alpha)},
        looped=state,
    )
    return form(q, k, v, alpha, g, state, reset)
