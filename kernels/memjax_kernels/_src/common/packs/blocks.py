"""Blocks of packed heads: layouts of arrays in memory, and blocks of a program.

The grid of such a kernel is (batch elements, groups of packs, chunks), the last in
order; `common.packs` says what a pack is. Tokens are [B, n, C, H D], as a projection
leaves them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from memjax_kernels._src.common.packs.tuned import Rows

# A chunk implementation calls its kernels with these.
PARAMS = pltpu.CompilerParams(
    # Heads do not depend on each other; a chunk needs the memory that the one before
    # left.
    dimension_semantics=("parallel", "parallel", "arbitrary"),
    vmem_limit_bytes=60 << 20,
)
# Tokens of a chunk come in these, which fill a register of 2 bytes, and channels of a
# pack in these.
ROWS, LANES = 16, 128


def misfit(q: Any, k: Any, v: Any, chunk_size: int = ROWS) -> str:
    """Why dtypes of tokens, or their chunks, do not fit a kernel; "" if they do."""
    kinds = {x.dtype.name for x in (q, k, v)}
    if len(kinds) > 1 or not kinds <= {"float32", "bfloat16"}:
        return f"q, k and v must all be float32 or all bfloat16, got {sorted(kinds)}"
    if chunk_size % ROWS:
        return f"chunk_size must be a multiple of {ROWS}, got {chunk_size}"
    return ""


def heads_of_rows(heads: int, arrays: Sequence[Any], sizes: Rows) -> int:
    """The most heads of a block [1, h, ...] that fit and divide all; 0 if none do.

    Args:
        heads: of all.
        arrays: float32 [B, H, ...] of a block, whose last two axes fill registers.
        sizes: the most heads and bytes of a block.
    """

    def padded(x):
        row, column = (1, 1, *x.shape[2:])[-2:]
        return -(-row // 8) * 8 * -(-column // LANES) * LANES

    most = min(sizes.heads, heads, sizes.bytes // (4 * sum(map(padded, arrays))))
    # Rows of several blocks must fill whole registers.
    fitting = [n for n in range(most, 0, -1) if n == heads or n % 8 == 0]
    return next((n for n in fitting if heads % n == 0), 0)


def repeat_heads(x: Float[Array, "*B H D"], copies: int) -> Float[Array, "*B HH D"]:
    """Copies of each head beside each other."""
    return x if copies == 1 else jnp.repeat(x, copies, axis=-2)


def pack_heads(memory: Float[Array, "B H M D"], heads: int) -> Float[Array, "B P M DD"]:
    """The memories of a pack's heads in one matrix."""
    b, number, slots, width = memory.shape
    split = memory.reshape(b, number // heads, heads, slots, width)
    return split.swapaxes(2, 3).reshape(b, -1, slots, heads * width)


def unpack_heads(
    memory: Float[Array, "B P M DD"], heads: int
) -> Float[Array, "B H M D"]:
    """Undoes `pack_heads`."""
    b, packs, slots, width = memory.shape
    split = memory.reshape(b, packs, slots, heads, width // heads)
    return split.swapaxes(2, 3).reshape(b, heads * packs, slots, -1)


def join_chunks(x: Array, number: int) -> Array:
    """Joins `number` chunks to a block: [B, n, C, ...] to [B, m, number C, ...]."""
    return x.reshape(x.shape[0], -1, number * x.shape[2], *x.shape[3:])


def split_chunks(x: Array, number: int) -> Array:
    """Undoes `join_chunks`."""
    return x.reshape(x.shape[0], -1, x.shape[2] // number, *x.shape[3:])


def gate_columns(gate: Array, group: int, heads: int) -> Array:
    """Gates as columns of each group's tokens.

    Args:
        gate: [B, n, C, H] or [B, n, C, H, passes].
        group: packs of a program.
        heads: of a pack.

    Returns:
        [B, n, groups, C, passes * heads * group]: of each pass the first heads of the
        packs, then the second, and so on.
    """
    b, n, c, number = gate.shape[:4]
    split = gate.reshape(b, n, c, number // (group * heads), group, heads, -1)
    return split.transpose(0, 1, 3, 2, 6, 5, 4).reshape(b, n, split.shape[3], c, -1)


def gates_of_columns(columns: Array, group: int, heads: int) -> Array:
    """Undoes `gate_columns`: [B, n, C, H, passes]."""
    b, n, groups, c, _ = columns.shape
    split = columns.reshape(b, n, groups, c, -1, heads, group)
    number = groups * group * heads
    return split.transpose(0, 1, 3, 2, 6, 5, 4).reshape(b, n, c, number, -1)


def flag_columns(flag: Array, like: Array) -> Array:
    """A flag [B, n] or [B, n, C] as a column to append to `gate_columns`."""
    flag = flag if flag.ndim == 3 else flag[..., None]
    wide = flag.astype(jnp.float32)[:, :, None, :, None]
    return jnp.broadcast_to(wide, (*like.shape[:4], 1))


class Specs(NamedTuple):
    """Blocks of a program.

    Attributes:
        rows: batch elements.
        group: packs of a batch element.
        groups: of all of its packs.
        order: of the chunks.
    """

    rows: int
    group: int
    groups: int
    order: Callable[[Any], Any]

    def tokens(self, tree, share: int = 1):
        """[B, n, C, H D], of which `share` neighbouring groups have one block."""

        def block(x):
            return (self.rows, None, x.shape[2], x.shape[3] * share // self.groups)

        def index(b, g, i):
            return b, self.order(i), 0, jax.lax.div(g, jnp.int32(share))

        def own(b, g, i):
            return b, self.order(i), 0, g

        return jax.tree.map(
            lambda x: pl.BlockSpec(block(x), own if share == 1 else index), tree
        )

    def gates(self, tree):
        """[B, n, groups, C, R]."""

        def spec(x):
            block = (self.rows, None, None, *x.shape[3:])
            return pl.BlockSpec(block, lambda b, g, i: (b, self.order(i), g, 0, 0))

        return jax.tree.map(spec, tree)

    def residuals(self, tree):
        """[B, n, P, ...]."""

        def spec(x):
            zeros = (0,) * (x.ndim - 3)
            block = (self.rows, None, self.group, *x.shape[3:])
            return pl.BlockSpec(block, lambda b, g, i: (b, self.order(i), g, *zeros))

        return jax.tree.map(spec, tree)

    def memories(self, tree):
        """[B, P, M, DD], for all chunks."""

        def block(x):
            return (self.rows, self.group, *x.shape[2:])

        return jax.tree.map(
            lambda x: pl.BlockSpec(block(x), lambda b, g, i: (b, g, 0, 0)), tree
        )

    def grid(self, tokens: Any) -> tuple[int, int, int]:
        """The programs for tokens [B, n, C, H D]."""
        return tokens.shape[0] // self.rows, self.groups, tokens.shape[1]
