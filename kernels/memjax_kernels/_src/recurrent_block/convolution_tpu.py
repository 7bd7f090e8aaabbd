"""The short convolution on a TPU: tokens are read once and written once.

    z_t = b + Σ_w f_w x_{t - (W - 1 - w)}      s = z σ(z)      y = s / |s|

    ds = (dy - y ⟨dy, y⟩) / |s|            dz = ds σ(z) (1 + z (1 - σ(z)))
    dx_t = Σ_w f_w dz_{t + (W - 1 - w)}    df_w = Σ_t dz_t x_{t - (W - 1 - w)}

with the product of a head and the norm of a head; without unit norm y = s, ds = dy.
The backward kernel runs from the last tokens and carries the dz that earlier ones need.
A bias b is a row behind the taps, which multiplies 1. Filters are halved on the way in:
of h = z / 2, s = h + h tanh(h) and 2 dz = ds (1 + tanh(h)) (1 + h - h tanh(h)) take
half the operations.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from memjax_kernels._src.common import gradients, partition, varying
from memjax_kernels._src.common.packs import tiles, tuned
from memjax_kernels._src.common.packs.tiles import BF16, F32, LANES, ROWS
from memjax_kernels._src.recurrent_block import xla
from memjax_kernels._src.recurrent_block.norms import LEAST_SQUARES, flat

# Rows of a filter's share in the arrays of the kernels.
SHARE = 8


class Static(NamedTuple):
    """Static arguments of the kernels; `width` is None without unit norm."""

    taps: int
    has_bias: bool
    width: int | None
    interpret: Any


def unsupported(x: Any, filters: Any, bias: Any = None) -> str:
    """Why the kernels cannot take these arguments on any TPU; "" if they can."""
    if filters.shape[0] + (bias is not None) > SHARE:
        and_bias = "" if bias is None else " and a bias"
        return f"filters of {filters.shape[0]} taps{and_bias} are wider than {SHARE}"
    return tiles.unsupported("x", x)


def short_convolution_tpu(
    x: Float[Array, "B T H K"],
    filters: Float[Array, "W H K"],
    before: Float[Array, "B _ H K"],
    positions: Int[Array, "B T"] | None,
    bias: Float[Array, "H K"] | None = None,
    *,
    unit_norm: bool = True,
    interpret: Any = False,
) -> Float[Array, "B T H K"]:
    """`short_convolution` in kernels."""
    seen, taps = None, filters.shape[0]
    if bias is not None:
        rows = filters.astype(F32), bias.astype(F32)[None]
        filters = jnp.concatenate(rows)
    if positions is not None:
        seen = jnp.minimum(positions, taps - 1).astype(BF16)
        # A column for each head, as a mesh divides heads.
        seen = jnp.broadcast_to(seen[..., None], x.shape[:3])[:, None]

    def heads_first(z):
        return jnp.swapaxes(z, 1, 2)

    width = x.shape[-1] if unit_norm else None
    static = Static(taps, bias is not None, width, interpret)
    form = partition.chunkwise(functools.partial(_on_device, static))
    _, y = form((x[:, None], seen), heads_first(filters[None]), heads_first(before))
    return y[:, 0]


def _on_device(static: Static, tokens, filters, before):
    """On a device's share: x [B, 1, T, H, K], filters and a bias [1, H, W + 1, K]."""
    x, seen = tokens[0][:, 0], None if tokens[1] is None else tokens[1][:, 0]

    def heads_second(z):
        return jnp.swapaxes(z, 1, 2)

    filters, before = heads_second(filters), heads_second(before).astype(x.dtype)
    given = varying.vary_alike((x, filters, before, seen))
    # A device of a mesh may hold heads that fill no lanes.
    form = _op if tiles.fills_lanes(x) else _in_xla
    return (), form(static, *given)[1][:, None]


def _in_xla(static: Static, x, filters, before, seen):
    """The function of the forward kernel."""
    positions = None if seen is None else seen[..., 0].astype(jnp.int32)
    bias = filters[0, static.taps] if static.has_bias else None
    given = x, filters[0, : static.taps], before, positions, bias
    return (), xla.short_convolution(*given, unit_norm=static.width is not None)


def _forward(static: Static, x, filters, before, seen, *, with_residuals: bool):
    del with_residuals
    y = _call(static, False, x, filters, before, seen)
    return ((), y.reshape(x.shape)), None


def _backward(static: Static, primals, residuals, cotangents):
    del residuals
    x, filters, before, seen = primals
    d_y = cotangents[1]
    d_x, d_filters = _call(static, True, x, filters, before, seen, d_y)
    d_filters = d_filters.reshape(x.shape[0], -1, SHARE, *x.shape[2:])
    # That of the halves.
    d_filters = (0.5 * d_filters.sum(axis=(0, 2))[None]).astype(filters.dtype)
    # Earlier inputs reach the first tokens alone. All heads are one axis in this slice,
    # or XLA would copy all tokens to another layout.
    few = static.taps - 1

    def begin(z):
        return flat(z)[:, :few].reshape(z.shape[0], few, *z.shape[2:])

    seen_first = None if seen is None else seen[:, :few]
    form = functools.partial(_in_xla, static, begin(x), filters, seen=seen_first)
    (d_before,) = jax.vjp(lambda before: form(before=before)[1], before)[1](begin(d_y))
    nothing = None if seen is None else jnp.zeros_like(seen)
    return d_x.reshape(x.shape), d_filters, d_before, nothing


_op = gradients.of_kernels("short_convolution", _forward, _backward, _in_xla)


def _call(static: Static, backward, x, filters, before, seen, d_y=None):
    """One of the kernels on tokens [B, T, C]."""
    tokens = flat(x)
    of = tiles.blocks_of(*tokens.shape)
    (batch, time, channels), size, lanes = of
    blocks = time // size

    def at(i):
        return blocks - 1 - i if backward else i

    block = pl.BlockSpec((None, size, lanes), lambda b, c, i: (b, at(i), c))
    # The rows before a block: the last of the one before it.
    halo = pl.BlockSpec(
        (None, ROWS, lanes),
        lambda b, c, i: (b, jnp.maximum(at(i) * (size // ROWS) - 1, 0), c),
    )

    def fixed(rows, one):
        return pl.BlockSpec(
            (None, rows, lanes), lambda b, c, i: (0 if one else b, 0, c)
        )

    def pad(z, rows, front):
        return jnp.pad(flat(z), ((0, 0), (rows, 0) if front else (0, rows), (0, 0)))

    taps = static.taps
    given = {
        "x": (tokens, block),
        "halo": (tokens, halo),
        "before": (pad(before, ROWS - taps + 1, True), fixed(ROWS, False)),
        "filters": (
            pad(0.5 * filters.astype(F32), SHARE - filters.shape[1], False),
            fixed(SHARE, True),
        ),
    }
    if seen is not None:
        spec = pl.BlockSpec((None, size, seen.shape[-1]), lambda b, c, i: (b, at(i), 0))
        given["seen"] = seen, spec
    outputs = varying.like(x, (batch, time, channels), x.dtype)
    out_specs, name = block, "short_convolution_forward"
    if d_y is not None:
        given["d_y"] = flat(d_y), block
        shape = (batch, filters.shape[1] * SHARE, channels)
        outputs = outputs, varying.like(x, shape, F32)
        out_specs = block, fixed(shape[1], False)
        name = "short_convolution_backward"
    kernel = _backward_kernel if backward else _forward_kernel
    # The rows before a block and its own; dz of a tile and of 8 rows behind it, as each
    # tap sees them. Columns of one register: rows from anywhere are one load.
    scratch = [pltpu.VMEM((lanes // LANES, ROWS + size, LANES), F32)]
    rows = tuned.SIZES.tiles.convolved_rows + SHARE
    columns = lanes // LANES, 1 if seen is None else taps, rows, LANES
    scratch += [pltpu.VMEM(columns, F32)] * backward
    kernel = functools.partial(
        kernel, static=static, first=blocks - 1 if backward else 0
    )
    arrays, specs = ({key: pair[i] for key, pair in given.items()} for i in (0, 1))
    return of.call(
        kernel,
        name,
        given=(arrays,),
        specs=(specs,),
        outputs=outputs,
        out_specs=out_specs,
        scratch=scratch,
        interpret=static.interpret,
    )


class Tile(NamedTuple):
    """Values of a tile's tokens in both kernels.

    Attributes:
        inputs: what each tap multiplies, 0 where that is of another document.
        filters: half of each tap's, [1, 128].
        masks: of each tap, whether what it sees is of the token's document; or None.
        h: half of what the taps give.
        tanh: of it.
        s: h + h tanh(h).
        inverse: 1 over the norm of s, of each head; or None.
    """

    inputs: list[Array]
    filters: list[Array]
    masks: list[Array | None]
    h: Array
    tanh: Array
    s: Array
    inverse: Array | None


def _tile(given, inputs, rows, at, ones, static: Static):
    """Convolves the tokens of a tile, whose block and halo are `inputs`."""
    taps, count = static.taps, rows.size
    column = inputs.at[at.start // LANES]
    begin = rows.start + ROWS - (taps - 1)
    window = [column[pl.ds(begin + w, count)] for w in range(taps)]
    filters = [given["filters"][w : w + 1, at] for w in range(taps)]
    masks: list[Any] = [None] * taps
    if "seen" in given:
        seen = jnp.broadcast_to(given["seen"][rows, :1].astype(F32), window[0].shape)
        masks = [seen >= taps - 1 - w for w in range(taps - 1)] + [None]
        window = list(map(_seen, window, masks))
    h = functools.reduce(jnp.add, map(jnp.multiply, filters, window))
    if static.has_bias:
        h += given["filters"][taps : taps + 1, at]
    tanh, inverse = jnp.tanh(h), None
    s = h + h * tanh
    if ones is not None:
        inverse = jax.lax.rsqrt(tiles.head_sums(s**2, ones) + LEAST_SQUARES)
    return Tile(window, filters, masks, h, tanh, s, inverse)


def _seen(x, mask):
    # No product: what another document has may be NaN.
    return x if mask is None else jnp.where(mask, x, 0.0)


def _begin(given, inputs, first):
    """Lays what comes before a block in front of it; `first` is the grid's."""
    begins = pl.program_id(2) == first
    halo = jnp.where(begins, given["before"][...], given["halo"][...])
    for i, column in enumerate(range(0, halo.shape[1], LANES)):
        at = slice(column, column + LANES)
        inputs[i, :ROWS] = halo[:, at].astype(F32)
        inputs[i, ROWS:] = given["x"][:, at].astype(F32)


def _forward_kernel(given, y, inputs, *, static: Static, first):
    _begin(given, inputs, first)
    ones = static.width and tiles.same_head(static.width)

    def convolve(rows, at):
        tile = _tile(given, inputs, rows, at, ones, static)
        of_norm = tile.s if tile.inverse is None else tile.s * tile.inverse
        y[rows, at] = of_norm.astype(y.dtype)

    tiles.by_tiles(y.shape, convolve, tuned.SIZES.tiles.convolved_rows)


def _backward_kernel(given, d_x, d_filters, inputs, behind, *, static: Static, first):
    _begin(given, inputs, first)
    ones, taps = static.width and tiles.same_head(static.width), static.taps

    @pl.when(pl.program_id(2) == 0)
    def _():
        behind[...] = jnp.zeros(behind.shape, F32)
        d_filters[...] = jnp.zeros(d_filters.shape, F32)

    def pull(rows, at):
        tile = _tile(given, inputs, rows, at, ones, static)
        d_s = given["d_y"][rows, at].astype(F32)
        if tile.inverse is not None:
            y = tile.s * tile.inverse
            d_s = tile.inverse * (d_s - y * tiles.head_sums(d_s * y, ones))
        # Twice that of z.
        d_z = d_s * (1 + tile.tanh) * (1 + (tile.h - tile.h * tile.tanh))
        if static.has_bias:
            d_filters[SHARE * taps :, at] += tiles.eights(d_z)
        found, count = tile.filters[-1] * d_z, rows.size
        columns = behind.at[at.start // LANES]
        for w in range(taps):
            mask, back = tile.masks[w], taps - 1 - w
            share = slice(SHARE * w, SHARE * (w + 1))
            d_filters[share, at] += tiles.eights(d_z * tile.inputs[w])
            if not back:
                continue
            column = columns.at[w if "seen" in given else 0]
            if mask is not None or not w:
                column[count : count + SHARE] = column[:SHARE]
                column[:count] = _seen(d_z, mask)
            found += tile.filters[w] * column[back : back + count]
        d_x[rows, at] = found.astype(d_x.dtype)

    rows = tuned.SIZES.tiles.convolved_rows
    tiles.by_tiles(d_x.shape, pull, rows, last_first=True)
