"""What the two kernels share: tiles of whole heads, and how tokens lie.

Tokens are [B, T, C], C the channels of all heads, as a projection leaves them. A
program has a block of them, and goes through it some rows at a time, tile by tile: 128
lanes, which whole heads fill.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float32

F32, BF16 = jnp.float32, jnp.bfloat16
# Lanes of a register, and rows of one of 2 bytes.
LANES, ROWS = 128, 16
# Tokens and lanes of a block, at most.
BLOCK, MOST_LANES = 512, 1024


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


def block_of(tokens: int, channels: int) -> tuple[int, int]:
    """Tokens and lanes of a block of [B, T, C], divisors of both."""
    fitting = lambda size, step, most: max(
        n for n in range(step, most + 1, step) if size % n == 0
    )
    return fitting(tokens, ROWS, BLOCK), fitting(channels, LANES, MOST_LANES)


def by_tiles(
    shape: tuple[int, ...],
    rows: int,
    tile: Callable[[Any, slice], None],
    last_first: bool = False,
) -> None:
    """Calls tile(place of some rows, lanes) for every tile of a block.

    Args:
        shape: tokens and lanes of the block.
        rows: of a tile, at most.
        tile: what is done.
        last_first: whether the last rows come first.
    """
    tokens, lanes = shape
    rows = max(n for n in range(ROWS, rows + 1, ROWS) if tokens % n == 0)
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
    lane = lambda axis: jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    head = lambda axis: jax.lax.div(lane(axis), jnp.int32(width))
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


def eights(x: Float32[Array, "N 128"]) -> Float32[Array, "8 128"]:
    """Sums over every eighth row: whole registers are added, and no more."""
    return x.reshape(-1, 8, LANES).sum(axis=0)


def traffic(tree: Any) -> pl.CostEstimate:
    """What a kernel moves at least: every array once, padded to whole registers.

    For XLA, which hides copies behind what takes long.
    """
    width = lambda x: -(-x.shape[-1] // LANES) * LANES
    padded = lambda x: math.prod(x.shape[:-1]) * width(x) * x.dtype.itemsize
    moved = sum(map(padded, jax.tree.leaves(tree)))
    return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved)


def parameters(vmem_bytes: int = 60 << 20) -> pltpu.CompilerParams:
    """Blocks of tokens follow one another; batch elements and lanes do not depend."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        vmem_limit_bytes=vmem_bytes,
    )
