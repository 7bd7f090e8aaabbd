"""Rotary embeddings (RoPE), and the layout of heads for attention kernels.

    rotate:  (x_i, x_{i + K/2}) ← (x_i cos - x_{i + K/2} sin, x_{i + K/2} cos + x_i sin)

Su et al. (2021), https://arxiv.org/abs/2104.09864, in the half-split layout of Llama.
Projections give [B, T, H, K], and attention kernels read [B, H, T, K]: `heads_first`
and `heads_last` convert in one pass each.

Shapes: B batch, T time, H heads, K channels of a head, P batch or nothing.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import arguments, implementations
from memjax_kernels._src.common.packs import tiles
from memjax_kernels._src.heads import layouts_tpu, rotate_tpu, xla

Implementation = Literal["xla", "pallas_tpu"]


def rotate(
    x: Float[Array, "*B T H K"],
    cos: Float[Array, "*P T half"],
    sin: Float[Array, "*P T half"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "*B T H K"]:
    """Turns each pair of channels (i, i + K/2) by its angle, in float32 inside.

    Args:
        x: heads; [B, T, H, K] for a kernel.
        cos: cosines of the angles of a token's pairs, which all heads share. Neither
            these nor the sines have a gradient.
        sin: sines.
        implementation: which code runs; None is the fastest that can.

    Raises:
        ValueError: unless K is even and the angles are those of T tokens and K / 2
            pairs, or on an implementation that is unknown or cannot run here.
    """
    arguments.require_array("x", x, "BTHK")
    if x.ndim < 3 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"x must be floating [..., T, H, K], got {x.dtype}{list(x.shape)}"
        )
    if x.shape[-1] % 2:
        raise ValueError(f"x must have an even number of channels, got {x.shape}")
    expected = (x.shape[-3], x.shape[-1] // 2)
    for name, table in (("cos", cos), ("sin", sin)):
        arguments.require_array(name, table, ("...", "T", "K/2"))
        lead = table.shape[:-2]
        # One table serves all batch elements, or each has its own.
        if table.shape[-2:] != expected or (lead != x.shape[:-3] and set(lead) - {1}):
            raise ValueError(
                f"{name} must end in {expected}, got {table.shape} for x {x.shape}"
            )
    form = implementations.choose(
        "rotate",
        implementation,
        {"xla": xla.rotate, "pallas_tpu": rotate_tpu.rotate_tpu},
        {"pallas_tpu": rotate_tpu.unsupported(x, cos)},
    )
    return form(x, *jax.lax.stop_gradient((cos, sin)))


def heads_first(
    x: Float[Array, "B T H K"], scale: float = 1.0
) -> Float[Array, "B H T K"]:
    """x times a scale, its heads before its tokens: in a program for a TPU alone.

    Raises:
        ValueError: on x of other axes.
    """
    arguments.check_shapes(x=(x, "B T H K"))
    if _left_to_xla(x):
        return (x * scale).swapaxes(1, 2)
    return layouts_tpu.moved(layouts_tpu.Static(True, scale), x)


def heads_last(x: Float[Array, "B H T K"]) -> Float[Array, "B T H K"]:
    """Undoes `heads_first`."""
    arguments.check_shapes(x=(x, "B H T K"))
    if _left_to_xla(jax.eval_shape(lambda x: x.swapaxes(1, 2), x)):
        return x.swapaxes(1, 2)
    return layouts_tpu.moved(layouts_tpu.Static(False, 1.0), x)


def _left_to_xla(x: Any) -> bool:
    """Whether XLA lays out [B, T, H, K].

    Heads of 128 channels fill registers. XLA reads a projection's result as it is,
    and a kernel would copy it.
    """
    return x.shape[-1] % tiles.LANES == 0 or bool(tiles.unsupported("x", x))
