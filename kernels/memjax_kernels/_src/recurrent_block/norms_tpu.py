"""Norms of heads on a TPU: tokens are read once, and the result written once.

    gated_norm      n = y / rms(y)      a = n ∘ scale      out = a ∘ gelu(u)
    l2_normalize    n = y / |y|                            out = c n

    da = dout ∘ gelu(u)      du = dout ∘ a ∘ gelu'(u)      dscale = Σ_t da ∘ n
    dn = da ∘ scale          dy = (dn - n mean(dn ∘ n)) / rms(y)

with the rms and the mean of a head; of `l2_normalize` dn = c dout, and sums of a head
in place of means.
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
from memjax_kernels._src.recurrent_block import norms, xla

# Rows of the sums of the scale's gradient.
SHARE = 8


class Static(NamedTuple):
    """Static arguments of the kernels.

    Attributes:
        width: of a head.
        norm: c, of every head; None with a gate.
        epsilon: under the root.
        interpret: as in `pallas_call`.
    """

    width: int
    norm: float | None
    epsilon: float
    interpret: Any

    @property
    def divisor(self) -> int:
        """Of a head's sums: its width where they are means."""
        return self.width if self.norm is None else 1


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
    static = Static(y.shape[-1], None, epsilon, interpret)
    form = functools.partial(_on_device, static)
    return partition.token_by_token(form)((y, gate), scale)


def l2_normalize_tpu(
    x: Float[Array, "B T H K"], *, norm: float = 1.0, interpret: Any = False
) -> Float[Array, "B T H K"]:
    """`l2_normalize` in kernels, for x that `tiles.unsupported` accepts."""
    static = Static(x.shape[-1], norm, norms.LEAST_SQUARES, interpret)
    form = functools.partial(_on_device, static)
    return partition.token_by_token(form, whole_sequences=True)((x, None), None)


def _on_device(static: Static, tokens, scale):
    """On a device's share: y and gate [B, T, H, K], scale [K]."""
    given = varying.vary_alike((*tokens, scale))
    # A device of a mesh may hold heads that fill no lanes.
    fits = not tiles.unsupported("y", tokens[0])
    return (_op_called(_name(static)) if fits else _in_xla)(static, *given)[1]


def _in_xla(static: Static, y, gate, scale):
    """The function of the forward kernel."""
    if static.norm is not None:
        return (), norms.l2_normalize(y, static.norm)
    return (), xla.gated_norm(y, gate, scale, epsilon=static.epsilon)


def _forward(static: Static, y, gate, scale, *, with_residuals: bool):
    del with_residuals
    out = _call(static, _forward_kernel, "forward", scale, y, gate)
    return ((), out.reshape(y.shape)), None


def _backward(static: Static, primals, residuals, cotangents):
    del residuals
    (y, gate, scale), (_, d_out) = primals, cotangents
    *d, d_scale = _call(static, _backward_kernel, "backward", scale, y, gate, d_out)
    d_y, d_gate = jax.tree.map(lambda x: x.reshape(y.shape), d)
    if d_scale is not None:
        d_scale = d_scale.reshape(-1, static.width).sum(axis=0)
    return d_y, d_gate, d_scale


def _name(static: Static) -> str:
    return "gated_norm" if static.norm is None else "l2_normalize"


@functools.cache
def _op_called(name: str) -> Any:
    return gradients.of_kernels(name, _forward, _backward, _in_xla)


def _call(static: Static, kernel, name, scale, y, gate, *d_out):
    """One of the kernels on tokens [B, T, C]; without a gate there is no scale."""
    y, gate, d_out = jax.tree.map(norms.flat, (y, gate, d_out))
    of = tiles.blocks_of(*y.shape)
    batch, _, channels = of.shape
    every_head = of_lanes = sums = of_sums = None
    if gate is not None:
        every_head = jnp.tile(scale.astype(F32), channels // static.width)[None]
        of_lanes = pl.BlockSpec((1, of.lanes), lambda b, c, i: (0, c))
        sums = varying.like(y, (batch, SHARE, channels), F32)
        of_sums = pl.BlockSpec((None, SHARE, of.lanes), lambda b, c, i: (b, 0, c))

    def of_tokens(block, tokens):
        return jax.tree.map(lambda _: block, tokens)

    given = (every_head, y, gate, *d_out)
    specs = (of_lanes, *of_tokens(of.tokens, given[1:]))
    outputs: Any = varying.like(y, y.shape, y.dtype)
    out_specs: Any = of.tokens
    if d_out:
        outputs = (*of_tokens(outputs, (y, gate)), sums)
        out_specs = (*of_tokens(out_specs, (y, gate)), of_sums)
    kernel = functools.partial(kernel, static=static)
    blocks = (given, specs, outputs, out_specs)
    name = f"{_name(static)}_{name}"
    return of.call(kernel, name, *blocks, interpret=static.interpret)


def _normed(y, ones, static: Static):
    """A tile's reads by the root of each head, and 1 over that."""
    mean = tiles.head_sums(y * y, ones) / static.divisor
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
        factor = static.norm
        if gate is not None:
            factor = scale[:, at] * _gelu(gate[rows, at].astype(F32))[0]
        out[rows, at] = (normed * factor).astype(out.dtype)

    tiles.by_tiles(out.shape, norm)


def _backward_kernel(scale, y, gate, d_out, d_y, d_gate, d_scale, *, static: Static):
    ones = tiles.same_head(static.width)

    if gate is not None:

        @pl.when(pl.program_id(2) == 0)
        def _():
            d_scale[...] = jnp.zeros(d_scale.shape, F32)

    def pull(rows, at):
        normed, inverse = _normed(y[rows, at].astype(F32), ones, static)
        d = d_out[rows, at].astype(F32)
        if gate is None:
            d_n = static.norm * d
        else:
            (gelu, slope), of_head = _gelu(gate[rows, at].astype(F32)), scale[:, at]
            d_a = d * gelu
            d_gate[rows, at] = (d * normed * of_head * slope).astype(d_gate.dtype)
            d_scale[:, at] += tiles.eights(d_a * normed)
            d_n = d_a * of_head
        mean = tiles.head_sums(d_n * normed, ones) / static.divisor
        d_y[rows, at] = (inverse * (d_n - normed * mean)).astype(d_y.dtype)

    tiles.by_tiles(d_y.shape, pull)
