"""The short convolution before a recurrent memory, and the gated norm after it.

    short_convolution(x) = l2_normalize(silu(conv(x)))      queries and keys
    l2_normalize(v) = n v / |v|                             values, where they are keys
    gated_norm(y, u) = RMSNorm(y) ∘ GeLU(u)                 reads

Norms are of each head. The convolution is causal and depthwise:
Gu & Dao (2023), https://arxiv.org/abs/2312.00752, figure 3.

Shapes: B batch, T time, H heads, K channels of a head, W width of the filters.
"""

import functools
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from memjax_kernels._src.common import arguments, implementations
from memjax_kernels._src.common.packs import tiles
from memjax_kernels._src.recurrent_block import (
    convolution_tpu,
    gated_norm_tpu,
    norms,
    unit_norm_tpu,
    xla,
)

Implementation = Literal["xla", "pallas_tpu"]


def short_convolution(
    x: Float[Array, "B T H K"],
    filters: Float[Array, "W H K"],
    before: Float[Array, "B _ H K"],
    positions: Int[Array, "B T"] | None = None,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "B T H K"]:
    """silu of each channel's convolution, each head of unit norm, in the dtype of x.

    Norms have 1e-6 added under the root: zeros stay zeros.

    Args:
        x: a segment.
        filters: a filter for each channel; the last tap multiplies the token itself.
        before: the W - 1 inputs before the segment, zeros where there are none.
        positions: of each token in its document, from 0, before which its filter sees
            nothing; None is one document, which `before` belongs to.
        implementation: which code runs; None is the fastest that can.

    Raises:
        ValueError: on shapes that do not fit, or an implementation that is unknown or
            cannot run here.
    """
    sizes = arguments.check_shapes(x=(x, "B T H K"), filters=(filters, "W H K"))
    expected = (sizes["B"], sizes["W"] - 1, sizes["H"], sizes["K"])
    arguments.require_array("before", before, "BWHK")
    if before.shape != expected:
        raise ValueError(f"before must have shape {expected}, got {before.shape}")
    if positions is not None:
        arguments.require_array("positions", positions, "BT")
        if positions.shape != x.shape[:2]:
            raise ValueError(
                f"positions must have shape {x.shape[:2]}, got {positions.shape}"
            )
        if not jnp.issubdtype(positions.dtype, jnp.integer):
            raise ValueError(f"positions must be integers, got {positions.dtype}")
    form = implementations.choose(
        "short_convolution",
        implementation,
        {
            "xla": xla.short_convolution,
            "pallas_tpu": convolution_tpu.short_convolution_tpu,
        },
        {"pallas_tpu": convolution_tpu.unsupported(x, filters)},
    )
    return form(x, filters, before, positions)


def l2_normalize(
    x: Float[Array, "*B H K"],
    *,
    norm: float = 1.0,
    implementation: Implementation | None = None,
) -> Float[Array, "*B H K"]:
    """Each head scaled to a norm, in float32 inside; zeros stay zeros.

    Norms of x have 1e-6 added under the root.

    Args:
        x: heads; [B, T, H, K] for a kernel.
        norm: n, of every head of the result.
        implementation: which code runs; None is the fastest that can.

    Raises:
        ValueError: on x without axes of heads and channels, or not floating; on an
            implementation that is unknown or cannot run here.
    """
    arguments.require_array("x", x, ("...", "H", "K"))
    letters = [f"B{i}" for i in range(x.ndim - 2)]
    arguments.check_shapes(x=(x, " ".join([*letters, "H", "K"])))
    unsupported = "tokens must be [B, T, H, K]"
    if x.ndim == 4:
        unsupported = tiles.unsupported("x", x)
    forms = {"xla": norms.l2_normalize, "pallas_tpu": unit_norm_tpu.l2_normalize_tpu}
    form = implementations.choose(
        "l2_normalize", implementation, forms, {"pallas_tpu": unsupported}
    )
    return form(x, norm=norm)


def gated_norm(
    y: Float[Array, "B T H K"],
    gate: Float[Array, "B T H K"],
    scale: Float[Array, " K"],
    epsilon: float,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "B T H K"]:
    """Each head over its rms, times a scale that heads share, times gelu of the gate.

    Args:
        y: reads of a memory.
        gate: u, whose dtype the result has.
        scale: of each channel of a head.
        epsilon: added to the mean square.
        implementation: which code runs; None is the fastest that can.

    Raises:
        ValueError: on shapes that do not fit, or an implementation that is unknown or
            cannot run here.
    """
    arguments.check_shapes(y=(y, "B T H K"), gate=(gate, "B T H K"), scale=(scale, "K"))
    form = implementations.choose(
        "gated_norm",
        implementation,
        {
            "xla": functools.partial(xla.gated_norm, epsilon=epsilon),
            "pallas_tpu": functools.partial(
                gated_norm_tpu.gated_norm_tpu, epsilon=epsilon
            ),
        },
        {"pallas_tpu": gated_norm_tpu.unsupported(y, gate)},
    )
    return form(y, gate, scale)
