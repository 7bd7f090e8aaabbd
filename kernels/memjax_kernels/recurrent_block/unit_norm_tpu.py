"""Heads of unit norm on a TPU: y = x / |x|, dx = (dy - y ⟨dy, y⟩) / |x|."""

import functools
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from memjax_kernels.common import gradients, partition, varying
from memjax_kernels.common.packs import tiles
from memjax_kernels.common.packs.tiles import F32
from memjax_kernels.recurrent_block import norms

# Tokens of a tile.
TILE = 128


class Static(NamedTuple):
    """What is fixed when a kernel is compiled.

    Attributes:
        width: channels of a head.
        interpret: whether the kernel is interpreted.
    """

    width: int
    interpret: Any


def l2_normalize_tpu(
    x: Float[Array, "B T H K"], *, interpret: Any = False
) -> Float[Array, "B T H K"]:
    """`l2_normalize` in kernels, of what `tiles.unsupported` does not refuse."""
    form = partition.chunkwise(functools.partial(_on_device, interpret=interpret))
    return form(x[:, None])[1][:, 0]


def _on_device(x, *, interpret):
    """On a device's share [B, 1, T, H, K]."""
    if tiles.fills_lanes(x):
        return (), _op(Static(x.shape[-1], interpret), x[:, 0])[1][:, None]
    # A device of a mesh may hold heads that fill no lanes.
    return (), norms.l2_normalize(x)


def _in_xla(static: Static, x):
    """The function of the forward kernel."""
    del static
    return (), norms.l2_normalize(x)


def _forward(static: Static, x, *, keep: bool):
    del keep
    return ((), _call(static, _forward_kernel, "l2_normalize_forward", x)), None


def _backward(static: Static, primals, kept, cotangents):
    del kept
    given = (*primals, cotangents[1])
    return (_call(static, _backward_kernel, "l2_normalize_backward", *given),)


_op = gradients.of_kernels("l2_normalize", _forward, _backward, _in_xla)


def _call(static: Static, kernel, name, *tokens):
    """One of the kernels on tokens [B, T, H, K]."""
    flat = [x.reshape(*x.shape[:2], -1) for x in tokens]
    of = tiles.blocks_of(*flat[0].shape)
    kernel, out = functools.partial(kernel, width=static.width), flat[0]
    specs, outputs = [of.tokens] * len(flat), varying.like(out, out.shape, out.dtype)
    given = (flat, specs, outputs, of.tokens)
    y = of.call(kernel, name, *given, interpret=static.interpret)
    return y.reshape(tokens[0].shape)


def _inverse(x, ones):
    """1 over the norm of each head."""
    return jax.lax.rsqrt(tiles.head_sums(x * x, ones) + norms.LEAST_SQUARES)


def _forward_kernel(x, y, *, width):
    ones = tiles.same_head(width)

    def divide(rows, at):
        high = x[rows, at].astype(F32)
        y[rows, at] = (high * _inverse(high, ones)).astype(y.dtype)

    tiles.by_tiles(y.shape, TILE, divide)


def _backward_kernel(x, d_y, d_x, *, width):
    ones = tiles.same_head(width)

    def pull(rows, at):
        high, d = x[rows, at].astype(F32), d_y[rows, at].astype(F32)
        inverse = _inverse(high, ones)
        y = high * inverse
        d_high = inverse * (d - y * tiles.head_sums(d * y, ones))
        d_x[rows, at] = d_high.astype(d_x.dtype)

    tiles.by_tiles(d_x.shape, TILE, pull)
