"""Elementwise kernels that read and write tokens once, in tiles of full heads.

Tokens are [B, T, C], C the channels of all heads, as a projection leaves them. A
program has a block of them, and goes through it some rows at a time, tile by tile: 128
lanes, which whole heads fill.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float32

from memjax_kernels._src.common.packs import tuned
from memjax_kernels._src.common.packs.blocks import LANES, PARAMS, ROWS

F32, BF16 = jnp.float32, jnp.bfloat16


def unsupported(name: str, x: Any) -> str:
    """Why the kernels cannot take [B, T, H, K] on any TPU; "" if they can."""
    if x.dtype != BF16:
        return f"{name} must be bfloat16, got {x.dtype}"
    if x.shape[1] % ROWS:
        return f"{x.shape[1]} tokens are no multiple of {ROWS}"
    if not fills_lanes(x):
        return f"{x.shape[2]} heads of {x.shape[3]} do not fill {LANES} lanes"
    return ""


def fills_lanes(x: Any) -> bool:
    """Whether whole heads of [..., H, K] fill tiles of 128 lanes."""
    heads, width = x.shape[-2:]
    return LANES % width == 0 and heads * width % LANES == 0


class Blocks(NamedTuple):
    """How tokens [B, T, C] are cut.

    Attributes:
        shape: of all tokens.
        size: tokens of a block, a divisor of T.
        lanes: of a block, a divisor of C.
    """

    shape: tuple[int, int, int]
    size: int
    lanes: int

    @property
    def tokens(self) -> pl.BlockSpec:
        """A block of tokens, first to last."""
        return pl.BlockSpec((None, self.size, self.lanes), lambda b, c, i: (b, i, c))

    def call(
        self,
        kernel: Callable[..., None],
        name: str,
        given: Any,
        specs: Any,
        outputs: Any,
        out_specs: Any,
        scratch: Sequence[Any] = (),
        *,
        interpret: Any,
    ) -> Any:
        """Runs a kernel on every block, those of the same lanes in their order.

        `kernel` takes references to the arguments `given`, the outputs and the scratch,
        which is in VMEM alone.
        """
        batch, time, channels = self.shape
        return pl.pallas_call(
            kernel,
            grid=(batch, channels // self.lanes, time // self.size),
            in_specs=specs,
            out_specs=out_specs,
            out_shape=outputs,
            scratch_shapes=scratch,
            # XLA hides copies behind what takes long.
            cost_estimate=_traffic(given, outputs),
            compiler_params=PARAMS,
            interpret=interpret,
            name=name,
        )(*given)


def blocks_of(batch: int, time: int, channels: int) -> Blocks:
    """The largest blocks of tokens [B, T, C] that fit."""

    def fitting(size, step, most):
        return max(n for n in range(step, most + 1, step) if size % n == 0)

    most = tuned.SIZES.tiles
    size, lanes = fitting(time, ROWS, most.tokens), fitting(channels, LANES, most.lanes)
    return Blocks((batch, time, channels), size, lanes)


def by_tiles(
    shape: tuple[int, ...],
    tile: Callable[[Any, slice], None],
    rows: int | None = None,
    last_first: bool = False,
) -> None:
    """Calls tile(place of some rows, lanes) for every tile of a block.

    Args:
        shape: tokens and lanes of the block.
        tile: what is done.
        rows: of a tile, at most; None is those of `tuned`.
        last_first: whether the last rows come first.
    """
    tokens, lanes = shape
    most = rows or tuned.SIZES.tiles.rows
    rows = max(n for n in range(ROWS, most + 1, ROWS) if tokens % n == 0)
    steps = tokens // rows

    def some_rows(i, _):
        i = steps - 1 - i if last_first else i
        begin = pl.multiple_of(i * rows, rows)
        for first in range(0, lanes, LANES):
            # Tiles of the same rows do not wait for each other.
            tile(pl.ds(begin, rows), slice(first, first + LANES))
        return _

    jax.lax.fori_loop(0, steps, some_rows, None)


def same_head(width: int) -> Any:
    """1 where two lanes are of one head, [128, 128]."""
    shape = (LANES, LANES)
    lane = functools.partial(jax.lax.broadcasted_iota, jnp.int32, shape)

    def head(axis):
        return jax.lax.div(lane(axis), jnp.int32(width))

    return (head(0) == head(1)).astype(F32)


def head_sums(x: Float32[Array, "N 128"], ones: Any) -> Float32[Array, "N 128"]:
    """Each head's sum over its lanes, in all of them.

    Products with ones of two parts, whose numbers the matrix unit takes as bfloat16: 16
    bits of each count, twice those of the result.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    # Cut and not rounded: one operation, where rounding takes six.
    high = jax.lax.bitcast_convert_type(bits & -0x10000, F32)
    dot = functools.partial(jax.lax.dot, preferred_element_type=F32)
    return dot(high, ones) + dot(x - high, ones)


def eights(x: Float32[Array, "N D"]) -> Float32[Array, "8 D"]:
    """Sums over every eighth row: whole registers are added, and no more."""
    return x.reshape(-1, 8, x.shape[-1]).sum(axis=0)


def _traffic(given: Any, outputs: Any) -> pl.CostEstimate:
    """Minimum bytes moved by a kernel: every array once, padded to full registers."""

    def width(x):
        return -(-x.shape[-1] // LANES) * LANES

    # An array may be given twice, in blocks of two kinds.
    once = {id(x): x for x in jax.tree.leaves(given)}
    moved = sum(
        math.prod(x.shape[:-1]) * width(x) * x.dtype.itemsize
        for x in (*once.values(), *jax.tree.leaves(outputs))
    )
    return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved)
