"""Legendre polynomials on a TPU, with a float64 as a pair of float32.

    P_{n+1}(z) = t + n / (n + 1) (t - P_{n-1}(z))        t = z P_n(z)

XLA emulates float64 by such pairs too, but in a dozen operations for each degree, each
of which waits for memory. Here all degrees are one kernel. A pair is (high, low), the
rounded number and the rounding error. Dekker (1971), "A floating-point technique for
extending the available precision".
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from memjax_kernels._src.common import partition, varying

Pair = tuple[Any, Any]
# Points of a program are whole registers, two where there are as many; degrees of a
# block are as many as leave its double buffer small.
LANES, SUBLANES, MOST_ROWS, DEGREES = 128, 8, 16, 128
# The upper half of a float32's 24 bits.
SPLIT = 2.0**12 + 1


def legendre_tpu(
    order: int,
    high: Float[Array, "R Q"],
    low: Float[Array, "R Q"],
    *,
    interpret: Any = False,
) -> Float[Array, "R N Q"]:
    """P_n(high + low) for n below `order`, rounded to float32.

    Args:
        order: N.
        high: points of [-1, 1], rounded.
        low: what rounding took from them.
        interpret: runs where there is no TPU.
    """
    form = functools.partial(_on_device, order=order, interpret=interpret)
    points = jnp.stack([high, low], axis=-1)[:, None, :, None]
    return partition.chunkwise(form)(points)[1][:, 0, :, 0]


def _on_device(points, *, order, interpret):
    """On a device's share of points [R, 1, Q, 1, 2]."""
    sets, _, count, _, _ = points.shape
    flat = points.reshape(sets * count, 2)
    rows = min(MOST_ROWS, -(-len(flat) // (LANES * SUBLANES)) * SUBLANES)
    flat = jnp.pad(flat, ((0, -len(flat) % (rows * LANES)), (0, 0)))
    tiles, steps = len(flat) // (rows * LANES), -(-order // DEGREES)
    high, low = (flat[:, i].reshape(-1, LANES) for i in range(2))
    n = np.arange(steps * DEGREES)
    ratio = n / (n + 1)
    ratio_high = ratio.astype(np.float32)
    ratio_low = (ratio - ratio_high).astype(np.float32)
    of_points = pl.BlockSpec((rows, LANES), lambda tile, _: (tile, 0))
    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    # Rows, of which `vmap` makes blocks that Mosaic takes.
    ratios = (jnp.asarray(x)[None] for x in (ratio_high, ratio_low))
    shape = (steps * DEGREES, tiles * rows, LANES)
    values = pl.pallas_call(
        _kernel,
        grid=(tiles, steps),
        in_specs=[scalars, scalars, of_points, of_points],
        out_specs=pl.BlockSpec(
            (DEGREES, rows, LANES), lambda tile, step: (step, tile, 0)
        ),
        out_shape=varying.like(points, shape, jnp.float32),
        scratch_shapes=[pltpu.VMEM((4, rows, LANES), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary")
        ),
        interpret=interpret,
        name="legendre",
    )(*varying.vary_alike((*ratios, high, low)))
    values = values.reshape(len(values), -1)[:order, : sets * count]
    values = jnp.moveaxis(values.reshape(order, sets, count), 1, 0)
    return (), values[:, None, :, None]


def _kernel(ratio_high, ratio_low, high, low, values, carried):
    """A block of degrees of some points; `carried` has P_{n-1} and P_n, both pairs."""
    first = pl.program_id(1) * DEGREES

    @pl.when(first == 0)
    def _():
        one, zero = jnp.ones(high.shape, jnp.float32), jnp.zeros(high.shape)
        for i, x in enumerate((zero, zero, one, zero)):
            carried[i] = x

    z = (high[...], low[...])

    def next_degree(i, pairs):
        before, now = pairs
        values[i] = now[0]
        ratio = (ratio_high[0, first + i], ratio_low[0, first + i])
        t = _multiply(z, now)
        change = _multiply(_add(t, (-before[0], -before[1])), ratio)
        return now, _add(t, change)

    pairs = ((carried[0], carried[1]), (carried[2], carried[3]))
    before, now = jax.lax.fori_loop(0, DEGREES, next_degree, pairs)
    for i, x in enumerate((*before, *now)):
        carried[i] = x


def _multiply(x: Pair, y: Pair) -> Pair:
    product = x[0] * y[0]
    (a, b), (c, d) = _halves(x[0]), _halves(y[0])
    rest = ((a * c - product) + a * d + b * c) + b * d
    return _rounded(product, rest + (x[0] * y[1] + x[1] * y[0]))


def _add(x: Pair, y: Pair) -> Pair:
    total = x[0] + y[0]
    of_y = total - x[0]
    rest = (x[0] - (total - of_y)) + (y[0] - of_y)
    return _rounded(total, rest + (x[1] + y[1]))


def _rounded(total, rest) -> Pair:
    """The pair of a sum whose second part is small."""
    high = total + rest
    return high, rest - (high - total)


def _halves(x) -> Pair:
    """Two numbers of 12 bits whose sum is x: products of such are exact."""
    scaled = SPLIT * x
    upper = scaled - (scaled - x)
    return upper, x - upper
