"""RoPE on a TPU: one pass, channels rotated inside a register."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from memjax_kernels._src.common import partition, varying
from memjax_kernels._src.common.packs import tiles
from memjax_kernels._src.common.packs.tiles import F32, LANES
from memjax_kernels._src.heads import xla


class Static(NamedTuple):
    """Static arguments of the kernels."""

    width: int
    interpret: Any


def unsupported(x: Any, cos: Any) -> str:
    """Why the kernel cannot take these arguments on any TPU; "" if it can."""
    if x.ndim != 4 or cos.ndim > 3:
        return "tokens must be [B, T, H, K] and angles [T, K/2] or [B, T, K/2]"
    if cos.ndim == 3 and cos.shape[0] not in (1, x.shape[0]):
        return f"angles of {cos.shape[0]} rows are not those of {x.shape[0]}"
    return tiles.unsupported("x", x)


def rotate_tpu(
    x: Float[Array, "B T H K"],
    cos: Float[Array, "*P T half"],
    sin: Float[Array, "*P T half"],
    *,
    interpret: Any = False,
) -> Float[Array, "B T H K"]:
    """`rotate` in a kernel."""
    form = functools.partial(_on_device, interpret=interpret)
    shared = cos.ndim == 2 or cos.shape[0] == 1
    if shared:
        angles = tuple(table.reshape(1, *table.shape[-2:]) for table in (cos, sin))
        return partition.token_by_token(
            lambda tokens, angles: form((*tokens, *angles), ()), whole_sequences=True
        )((x,), angles)
    return partition.token_by_token(form, whole_sequences=True)((x, cos, sin), ())


def _on_device(tokens, _, *, interpret):
    """On a device's share: x [B, T, H, K], angles [1 or B, T, K/2]."""
    x, cos, sin = varying.vary_alike(tokens)
    if not tiles.fills_lanes(x):
        # A device of a mesh may hold heads that fill no lanes.
        return xla.rotate(x, cos, sin)
    return _turned(Static(x.shape[-1], interpret), x, cos, sin)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _turned(static: Static, x, cos, sin):
    flat = x.reshape(*x.shape[:2], -1)
    of = tiles.blocks_of(*flat.shape)

    # The first half of a head gets minus the sine of its partner.
    def repeated(first, second):
        return jnp.tile(
            jnp.concatenate([first, second], axis=-1), LANES // static.width
        )

    tables = repeated(cos, cos), repeated(-sin, sin)
    shared = cos.shape[0] == 1
    of_angles = pl.BlockSpec(
        (None, of.size, LANES), lambda b, c, i: (0 if shared else b, i, 0)
    )
    kernel = functools.partial(_kernel, half=static.width // 2)
    specs, outputs = (
        (of.tokens, of_angles, of_angles),
        varying.like(flat, flat.shape, flat.dtype),
    )
    given = ((flat, *tables), specs, outputs, of.tokens)
    y = of.call(kernel, "rotate", *given, interpret=static.interpret)
    return y.reshape(x.shape)


def _forward(static, x, cos, sin):
    return _turned(static, x, cos, sin), (cos, sin)


def _backward(static, angles, d_y):
    cos, sin = angles
    # Turned back; the op differentiates itself, for gradients of gradients.
    nothing = jnp.zeros_like(cos)
    return _turned(static, d_y, cos, -sin), nothing, nothing


_turned.defvjp(_forward, _backward)


def _kernel(x, cos, sin, y, *, half):
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    first = jax.lax.rem(lane, jnp.int32(2 * half)) < half

    def turn(rows, at):
        high = x[rows, at].astype(F32)
        after, before = (pltpu.roll(high, shift, 1) for shift in (LANES - half, half))
        partner = jnp.where(first, after, before)
        y[rows, at] = (high * cos[rows] + partner * sin[rows]).astype(y.dtype)

    tiles.by_tiles(y.shape, turn)
