"""Normalisation of heads on a TPU.

u = x / |x|    y = n u    dx = n (dy - u ⟨dy, u⟩) / |x|
"""

import functools
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from memjax_kernels._src.common import gradients, partition, varying
from memjax_kernels._src.common.packs import tiles
from memjax_kernels._src.common.packs.tiles import F32
from memjax_kernels._src.recurrent_block import norms

# Tokens of a tile.
TILE = 128


class Static(NamedTuple):
    """Static arguments of the kernels."""

    width: int
    norm: float
    interpret: Any


def l2_normalize_tpu(
    x: Float[Array, "B T H K"], *, norm: float = 1.0, interpret: Any = False
) -> Float[Array, "B T H K"]:
    """`l2_normalize` in kernels, for x that `tiles.unsupported` accepts."""
    form = functools.partial(_on_device, norm=norm, interpret=interpret)
    return partition.chunkwise(form)(x[:, None])[1][:, 0]


def _on_device(x, *, norm, interpret):
    """On a device's share [B, 1, T, H, K]."""
    if tiles.fills_lanes(x):
        return (), _op(Static(x.shape[-1], norm, interpret), x[:, 0])[1][:, None]
    # A device of a mesh may hold heads that fill no lanes.
    return (), norms.l2_normalize(x, norm)


def _in_xla(static: Static, x):
    """The function of the forward kernel."""
    return (), norms.l2_normalize(x, static.norm)


def _forward(static: Static, x, *, with_residuals: bool):
    del with_residuals
    return ((), _call(static, _forward_kernel, "l2_normalize_forward", x)), None


def _backward(static: Static, primals, residuals, cotangents):
    del residuals
    given = (*primals, cotangents[1])
    return (_call(static, _backward_kernel, "l2_normalize_backward", *given),)


_op = gradients.of_kernels("l2_normalize", _forward, _backward, _in_xla)


def _call(static: Static, kernel, name, *tokens):
    """One of the kernels on tokens [B, T, H, K]."""
    flat = [x.reshape(*x.shape[:2], -1) for x in tokens]
    of = tiles.blocks_of(*flat[0].shape)
    kernel, out = functools.partial(kernel, static=static), flat[0]
    specs, outputs = [of.tokens] * len(flat), varying.like(out, out.shape, out.dtype)
    given = (flat, specs, outputs, of.tokens)
    y = of.call(kernel, name, *given, interpret=static.interpret)
    return y.reshape(tokens[0].shape)


def _inverse(x, ones):
    """1 over the norm of each head."""
    return jax.lax.rsqrt(tiles.head_sums(x * x, ones) + norms.LEAST_SQUARES)


def _forward_kernel(x, y, *, static: Static):
    ones = tiles.same_head(static.width)

    def divide(rows, at):
        high = x[rows, at].astype(F32)
        y[rows, at] = (high * (static.norm * _inverse(high, ones))).astype(y.dtype)

    tiles.by_tiles(y.shape, TILE, divide)


def _backward_kernel(x, d_y, d_x, *, static: Static):
    ones = tiles.same_head(static.width)

    def pull(rows, at):
        high, d = x[rows, at].astype(F32), d_y[rows, at].astype(F32)
        inverse = _inverse(high, ones)
        unit = high * inverse
        d_unit = d - unit * tiles.head_sums(d * unit, ones)
        d_high = static.norm * inverse * d_unit
        d_x[rows, at] = d_high.astype(d_x.dtype)

    tiles.by_tiles(d_x.shape, TILE, pull)
