"""The gated norm on a TPU: reads and gates are read once, and the result written once.

    n = y / rms(y)      a = n ∘ scale      out = a ∘ gelu(u)

    da = dout ∘ gelu(u)      du = dout ∘ a ∘ gelu'(u)      dscale = Σ_t da ∘ n
    dn = da ∘ scale          dy = (dn - n mean(dn ∘ n)) / rms(y)

with the rms and the mean of a head.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from memjax_kernels._src.common import gradients, partition, varying
from memjax_kernels._src.common.packs import tiles
from memjax_kernels._src.common.packs.tiles import F32
from memjax_kernels._src.recurrent_block import xla

# Rows of the sums of the scale's gradient; and tokens of a tile.
SHARE, TILE = 8, 128


class Static(NamedTuple):
    """Static arguments of the kernels."""

    width: int
    epsilon: float
    interpret: Any


def unsupported(y: Any, gate: Any) -> str:
    """Why the kernels cannot take these arguments on any TPU; "" if they can."""
    return tiles.unsupported("y", y) or tiles.unsupported("gate", gate)


def gated_norm_tpu(
    y: Float[Array, "B T H K"],
    gate: Float[Array, "B T H K"],
    scale: Float[Array, " K"],
    *,
    epsilon: float,
    interpret: Any = False,
) -> Float[Array, "B T H K"]:
    """`gated_norm` in kernels."""
    form = functools.partial(_on_device, epsilon=epsilon, interpret=interpret)
    return partition.token_by_token(form)((y, gate), scale)


def _on_device(tokens, scale, *, epsilon, interpret):
    """On a device's share: y and gate [B, T, H, K], scale [K]."""
    y, gate = tokens
    static = Static(y.shape[-1], epsilon, interpret)
    given = varying.vary_alike((y, gate, scale))
    if tiles.unsupported("y", y):
        # A device of a mesh may hold heads that fill no lanes.
        return _in_xla(static, *given)[1]
    return _op(static, *given)[1]


def _in_xla(static: Static, y, gate, scale):
    """The function of the forward kernel."""
    return (), xla.gated_norm(y, gate, scale, epsilon=static.epsilon)


def _forward(static: Static, y, gate, scale, *, with_residuals: bool):
    del with_residuals
    out = _call(static, _forward_kernel, "gated_norm_forward", scale, y, gate)
    return ((), out.reshape(y.shape)), None


def _backward(static: Static, primals, residuals, cotangents):
    del residuals
    (y, gate, scale), (_, d_out) = primals, cotangents
    given = (y, gate, d_out)
    found = _call(static, _backward_kernel, "gated_norm_backward", scale, *given)
    d_y, d_gate, d_scale = found
    d_scale = d_scale.reshape(-1, static.width).sum(axis=0)
    return d_y.reshape(y.shape), d_gate.reshape(y.shape), d_scale


_op = gradients.of_kernels("gated_norm", _forward, _backward, _in_xla)


def _call(static: Static, kernel, name, scale, *tokens):
    """One of the kernels on tokens [B, T, C]."""
    tokens = [x.reshape(*x.shape[:2], -1) for x in tokens]
    of = tiles.blocks_of(*tokens[0].shape)
    batch, _, channels = of.shape
    every_head = jnp.tile(scale.astype(F32), channels // static.width)[None]
    of_lanes = pl.BlockSpec((1, of.lanes), lambda b, c, i: (0, c))
    out = varying.like(tokens[0], tokens[0].shape, tokens[0].dtype)
    outputs, out_specs = out, of.tokens
    if kernel is _backward_kernel:
        sums = varying.like(tokens[0], (batch, SHARE, channels), F32)
        outputs = out, out, sums
        of_sums = pl.BlockSpec((None, SHARE, of.lanes), lambda b, c, i: (b, 0, c))
        out_specs = of.tokens, of.tokens, of_sums
    specs = (of_lanes, *[of.tokens] * len(tokens))
    kernel = functools.partial(kernel, static=static)
    given = ((every_head, *tokens), specs, outputs, out_specs)
    return of.call(kernel, name, *given, interpret=static.interpret)


def _normed(y, ones, static):
    """The norm of a tile's reads, and 1 over the rms of each head."""
    mean = tiles.head_sums(y * y, ones) / static.width
    inverse = jax.lax.rsqrt(mean + static.epsilon)
    return y * inverse, inverse


def _gelu(u):
    """gelu(u), approximated by tanh as in `jax.nn.gelu`, and its derivative."""
    root, cubic = math.sqrt(2 / math.pi), 0.044715
    square = u * u
    tanh = jnp.tanh(root * u * (1 + cubic * square))
    half = 0.5 * (1 + tanh)
    inner = root * (1 + 3 * cubic * square)
    return u * half, half + 0.5 * u * (1 - tanh * tanh) * inner


def _forward_kernel(scale, y, gate, out, *, static: Static):
    ones = tiles.same_head(static.width)

    def norm(rows, at):
        normed, _ = _normed(y[rows, at].astype(F32), ones, static)
        gelu, _ = _gelu(gate[rows, at].astype(F32))
        out[rows, at] = (normed * scale[:, at] * gelu).astype(out.dtype)

    tiles.by_tiles(out.shape, TILE, norm)


def _backward_kernel(scale, y, gate, d_out, d_y, d_gate, d_scale, *, static: Static):
    ones = tiles.same_head(static.width)

    @pl.when(pl.program_id(2) == 0)
    def _():
        d_scale[...] = jnp.zeros(d_scale.shape, F32)

    def pull(rows, at):
        normed, inverse = _normed(y[rows, at].astype(F32), ones, static)
        gelu, slope = _gelu(gate[rows, at].astype(F32))
        d, of_head = d_out[rows, at].astype(F32), scale[:, at]
        d_a = d * gelu
        d_gate[rows, at] = (d * normed * of_head * slope).astype(d_gate.dtype)
        d_scale[:, at] += tiles.eights(d_a * normed)
        d_n = d_a * of_head
        mean = tiles.head_sums(d_n * normed, ones) / static.width
        d_y[rows, at] = (inverse * (d_n - normed * mean)).astype(d_y.dtype)

    tiles.by_tiles(d_y.shape, TILE, pull)
