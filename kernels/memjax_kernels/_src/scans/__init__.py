"""Elementwise gated scans: memories whose channels decay each by itself.

    h = exp(g) h + u                                y = h          gated_scan
    S = exp(a Δ) S + b (Δ u)ᵀ                       y = Sᵀ c       selective_scan

`forms` says where `xla` is a loop over tokens, and where it runs all chunks at once.

Shapes: B batch, T time, I channels, N states of a channel.
"""

from typing import Literal

from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common.arguments import (
    check_float32,
    check_gates,
    check_mask,
    check_shapes,
)
from memjax_kernels._src.common.implementations import choose
from memjax_kernels._src.scans import forms
from memjax_kernels._src.scans.steps import (
    GatedScanState,
    SelectiveScanState,
    check_selective,
    gated_scan_init_state,
    selective_scan_init_state,
)

Implementation = Literal["reference", "xla"]


def gated_scan(
    u: Float[Array, "B T I"],
    g: Float[Array, "B T I"],
    state: GatedScanState | None = None,
    *,
    reset: Bool[Array, "B T"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[GatedScanState, Float[Array, "B T I"]]:
    """A gated sum of each channel: h ← exp(g) h + u, y = h, for T tokens, T at least 1.

    The recurrence of RG-LRU: De et al. (2024), https://arxiv.org/abs/2402.19427,
    equation 4, whose input gate and scale are left to the layer.

    Args:
        u: writes.
        g: log of each channel's decay factor, in [-inf, 0]; inside jit the range is the
            caller's promise.
        state: h before the segment, float32; None is empty.
        reset: True empties the memory of a batch element before that token.
        implementation: which code runs; None is the fastest that can.

    Returns:
        h after the segment, float32, and after each token's write, in the dtype of u.

    Raises:
        ValueError: on shapes or dtypes that do not fit, gates out of range, or an
            implementation that is unknown.
    """
    sizes = check_shapes(u=(u, "B T I"), g=(g, "B T I"), state=(state, "B I?"))
    check_float32("state", state)
    check_gates(g=g)
    check_mask("reset", reset, sizes["B"], sizes["T"])
    if state is None:
        state = gated_scan_init_state(sizes["B"], sizes["I"])
    form = choose(
        "gated_scan",
        implementation,
        {"xla": forms.gated_scan_xla, "reference": forms.gated_scan_reference},
    )
    return form(u, g, state, reset)


def selective_scan(
    u: Float[Array, "B T I"],
    delta: Float[Array, "B T I"],
    a: Float[Array, "N I"],
    b: Float[Array, "B T N"],
    c: Float[Array, "B T N"],
    state: SelectiveScanState | None = None,
    *,
    reset: Bool[Array, "B T"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[SelectiveScanState, Float[Array, "B T I"]]:
    """Selective state spaces (Mamba): S ← exp(a Δ) S + b (Δ u)ᵀ, y = Sᵀ c.

    For T tokens, T at least 1. Gu & Dao (2023), https://arxiv.org/abs/2312.00752,
    section 3.2 and algorithm 2, with their code's step for b (Δ b, not the exact
    integral). The skip D u is left to the layer. Training saves the memories of some
    tokens alone, and computes those between again.

    Args:
        u: inputs of the channels.
        delta: steps Δ, at least 0, after the softplus.
        a: rates of decay, at most 0, of each state of each channel.
        b: what each state takes of a token, for all channels.
        c: how each state is read.
        state: S before the segment, float32; None is empty.
        reset: True empties the memory of a batch element before that token.
        implementation: which code runs; None is the fastest that can.

    Returns:
        S after the segment, float32, and the read after each token's write, in the
        dtype of u.

    Raises:
        ValueError: on shapes or dtypes that do not fit, a step or a rate out of range
            where it is known, or an implementation that is unknown.
    """
    sizes = check_selective(u, delta, a, b, c, state)
    check_float32("state", state)
    check_mask("reset", reset, sizes["B"], sizes["T"])
    if state is None:
        state = selective_scan_init_state(sizes["B"], sizes["I"], sizes["N"])
    form = choose(
        "selective_scan",
        implementation,
        {"xla": forms.selective_scan_xla, "reference": forms.selective_scan_reference},
    )
    return form(u, delta, a, b, c, state, reset)
