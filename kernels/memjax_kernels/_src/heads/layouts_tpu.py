"""Transposes of heads and tokens on a TPU: one pass, where XLA makes two or three."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from memjax_kernels._src.common import varying
from memjax_kernels._src.common.packs import tiles
from memjax_kernels._src.common.packs.tiles import F32, LANES


class Static(NamedTuple):
    """Static arguments of the kernels.

    The result is [B, H, T, K] with `heads_first`, else [B, T, H, K], times `scale`.
    """

    heads_first: bool
    scale: float
    interpret: Any = False


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def moved(static: Static, x: Float[Array, "B X Y K"]) -> Float[Array, "B Y X K"]:
    """x of one layout in the other, times the scale."""
    batch, one, other, width = x.shape
    time, heads = (one, other) if static.heads_first else (other, one)
    of = tiles.blocks_of(batch, time, heads * width)
    block = (None, of.lanes // width, of.size, width)
    by_head = pl.BlockSpec(block, lambda b, c, i: (b, c, i, 0))
    spec, out_spec, shape = by_head, of.tokens, of.shape
    kernel, name = _last_kernel, "heads_last"
    if static.heads_first:
        spec, out_spec, shape = of.tokens, by_head, (batch, heads, time, width)
        kernel, name = _first_kernel, "heads_first"
        x = x.reshape(of.shape)
    kernel = functools.partial(kernel, width=width, scale=static.scale)
    given = ((x,), (spec,), varying.like(x, shape, x.dtype), out_spec)
    y = of.call(kernel, name, *given, interpret=static.interpret)
    return y if static.heads_first else y.reshape(batch, time, heads, width)


def _backward(static, _, d_y):
    back = static._replace(heads_first=not static.heads_first)
    return (moved(back, d_y),)


moved.defvjp(lambda static, x: (moved(static, x), None), _backward)


def _scaled(x, scale):
    return x if scale == 1.0 else (x.astype(F32) * scale).astype(x.dtype)


def _first_kernel(x, y, *, width, scale):
    def move(rows, at):
        tile = _scaled(x[rows, at], scale)
        for i in range(LANES // width):
            y[at.start // width + i, rows] = tile[:, i * width : (i + 1) * width]

    tiles.by_tiles(x.shape, move)


def _last_kernel(x, y, *, width, scale):
    def move(rows, at):
        heads = range(at.start // width, at.stop // width)
        tile = jnp.concatenate([x[head, rows] for head in heads], axis=1)
        y[rows, at] = _scaled(tile, scale)

    tiles.by_tiles(y.shape, move)
