"""The short convolution before a recurrent memory, and the gated norm after it.

    short_convolution(x) = l2_normalize(silu(conv(x)))      queries and keys
    l2_normalize(v) = n v / |v|                             values, where they are keys
    gated_norm(y, u) = RMSNorm(y) ∘ GeLU(u)                 reads

Norms are of each head. The convolution is causal and depthwise:
Gu & Dao (2023), https://arxiv.org/abs/2312.00752, figure 3. Published models have other
activations, biases, norms and orders, which are options. Kernels have biases and no
norm; all else of them is XLA's.

Shapes: B batch, T time, H heads, K channels of a head, W width of the filters.
"""

import functools
from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from memjax_kernels._src.common import arguments, implementations
from memjax_kernels._src.common.packs import tiles
from memjax_kernels._src.recurrent_block import (
    convolution_tpu,
    norms,
    norms_tpu,
    xla,
)

Implementation = Literal["xla", "pallas_tpu"]
ConvolutionActivation = Literal["silu", "none"]
GateActivation = Literal["gelu", "silu", "sigmoid"]


def short_convolution(
    x: Float[Array, "B T H K"],
    filters: Float[Array, "W H K"],
    before: Float[Array, "B _ H K"],
    positions: Int[Array, "B T"] | None = None,
    *,
    bias: Float[Array, "H K"] | None = None,
    activation: ConvolutionActivation = "silu",
    unit_norm: bool = True,
    implementation: Implementation | None = None,
) -> Float[Array, "B T H K"]:
    """silu of each channel's convolution, each head of unit norm, in the dtype of x.

    Norms have 1e-6 added to the sum of squares under the root: zeros stay zeros.

    Args:
        x: a segment.
        filters: a filter for each channel; the last tap multiplies the token itself.
        before: the W - 1 inputs before the segment, zeros where there are none.
        positions: of each token in its document, from 0, before which its filter sees
            nothing; None is one document, which `before` belongs to.
        bias: of each channel, added to the convolution; None is none.
        activation: of the convolution, "silu" or "none".
        unit_norm: whether each head is divided by its norm.
        implementation: which code runs; None is the fastest that can.

    Raises:
        ValueError: on shapes that do not fit, an activation that is unknown, or an
            implementation that is unknown or cannot run here.
    """
    sizes = arguments.check_shapes(
        x=(x, "B T H K"), filters=(filters, "W H K"), bias=(bias, "H K?")
    )
    arguments.check_choice("activation", activation, get_args(ConvolutionActivation))
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
    reason = convolution_tpu.unsupported(x, filters, bias)
    if activation != "silu":
        reason = f"its activation is silu, got {activation}"
    form = implementations.choose(
        "short_convolution",
        implementation,
        {
            "xla": functools.partial(
                xla.short_convolution, activation=activation, unit_norm=unit_norm
            ),
            "pallas_tpu": functools.partial(
                convolution_tpu.short_convolution_tpu, unit_norm=unit_norm
            ),
        },
        {"pallas_tpu": reason},
    )
    given = () if bias is None else (bias,)
    return form(x, filters, before, positions, *given)


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
    forms = {"xla": norms.l2_normalize, "pallas_tpu": norms_tpu.l2_normalize_tpu}
    forms = {name: functools.partial(form, norm=norm) for name, form in forms.items()}
    form = implementations.choose(
        "l2_normalize", implementation, forms, {"pallas_tpu": unsupported}
    )
    return form(x)


def gated_norm(
    y: Float[Array, "B T H K"],
    gate: Float[Array, "B T H K"],
    scale: Float[Array, "*H K"],
    epsilon: float,
    *,
    activation: GateActivation = "gelu",
    gate_first: bool = False,
    heads_per_norm: int = 1,
    implementation: Implementation | None = None,
) -> Float[Array, "B T H K"]:
    """Each head over its rms, times a scale, times the activation of the gate.

    Args:
        y: reads of a memory.
        gate: u, whose dtype the result has.
        scale: of each channel of a head [K], or of each channel [H, K].
        epsilon: added to the mean square.
        activation: f of the gate: "gelu" (its tanh form), "silu" or "sigmoid".
        gate_first: RMSNorm(y ∘ f(u)), as Mamba-2 has it, and not RMSNorm(y) ∘ f(u).
        heads_per_norm: neighbouring heads that share one rms; divides H.
        implementation: which code runs; None is the fastest that can.

    Raises:
        ValueError: on shapes that do not fit, an activation that is unknown, heads
            that cannot be divided so, or an implementation that is unknown or cannot
            run here.
    """
    axes = "K" if getattr(scale, "ndim", 1) == 1 else "H K"
    sizes = arguments.check_shapes(
        y=(y, "B T H K"), gate=(gate, "B T H K"), scale=(scale, axes)
    )
    arguments.check_choice("activation", activation, get_args(GateActivation))
    arguments.check_sizes(heads_per_norm=heads_per_norm)
    if sizes["H"] % heads_per_norm:
        raise ValueError(
            f"heads_per_norm must divide H={sizes['H']}, got {heads_per_norm}"
        )
    reason = norms_tpu.unsupported(y, gate)
    if activation != "gelu" or gate_first or heads_per_norm > 1 or axes != "K":
        reason = "it has GeLU behind a norm of each head, with one scale for all"
    options = {
        "activation": activation,
        "gate_first": gate_first,
        "heads_per_norm": heads_per_norm,
    }
    form = implementations.choose(
        "gated_norm",
        implementation,
        {
            "xla": functools.partial(xla.gated_norm, epsilon=epsilon, **options),
            "pallas_tpu": functools.partial(norms_tpu.gated_norm_tpu, epsilon=epsilon),
        },
        {"pallas_tpu": reason},
    )
    return form(y, gate, scale)
