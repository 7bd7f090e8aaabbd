"""Trellis on a TPU for packed heads, in chunks of at most 8 tokens.

A block is 16 tokens of consecutive chunks. `equations` has the equations of a chunk,
`tpu_op` the op.

Memories before a block are saved in float32: the backward kernel computes those before
its chunks again, and then each chunk's cotangents.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from memjax_kernels._src.common.packs.blocks import ROWS, divisor, packings
from memjax_kernels._src.common.packs.chunkwise import Chunks, Layout
from memjax_kernels._src.trellis.segment import Tokens
from memjax_kernels._src.trellis.tpu_op import op_of, run
from memjax_kernels._src.trellis.tpu_small.blocks import Rows
from memjax_kernels._src.trellis.tpu_small.equations import Decays, Part
from memjax_kernels._src.trellis.tpu_small.kernels import (
    backward_kernel,
    forward_kernel,
)

F32 = jnp.float32
# Rows of a register: a pack has the heads whose chunks fill it.
SUBLANES = 8
# Heads of a program, up to which it takes further batch elements, and bytes.
HEADS, VMEM_BYTES = 48, 57 << 20


def heads_of_pack(size: int, heads: int, widths: tuple[int, int, int]) -> int:
    """Heads of a pack: the most whose chunks fit in 8 rows, else the fewest; 0 is none.

    Widths are those of keys and values, and the slots.
    """
    fitting = packings(heads, widths, _block_bytes(size, *widths))
    few = [number for number in fitting if number * size <= SUBLANES]
    return max(few, default=min(fitting, default=0))


def _widths(tokens: Tokens) -> tuple[int, int, int]:
    return tokens.q.shape[4], tokens.v.shape[4], tokens.alpha.shape[4]


def _block_bytes(
    size: int, key_dim: int, value_dim: int, slots: int, plain: bool = False
) -> int:
    """Estimate of the backward kernel's VMEM for one head, in bytes."""
    # In float32. Buffers of memories in and out, and one before each chunk of a block;
    # more of them where operands are float32 too.
    # Tokens and their cotangents, in rows of whole registers.
    channels, parts = key_dim + value_dim, ROWS // size
    memories = slots * channels * (parts + (12 if plain else 16))
    rows = max(2 * ROWS, parts * SUBLANES)
    return 4 * (memories + rows * 3 * (channels + slots))


def in_chunks(
    tokens: Tokens,
    memory: tuple[Array, Array],
    empty: tuple[Array, Array] | None,
    *,
    phi: str,
    activation: str,
    interpret: Any = False,
) -> tuple[tuple[Array, Array], Array]:
    """A chunk implementation where heads fill packs; see `segment`."""
    b, _, size, number = tokens.q.shape[:4]
    heads = heads_of_pack(size, number, _widths(tokens))
    plain = tokens.q.dtype == jnp.bfloat16
    each = heads * _block_bytes(size, *_widths(tokens), plain)
    most = max(1, min(HEADS // heads, VMEM_BYTES // each))
    group = divisor(number // heads, most)
    layout = Layout(
        divisor(b, most // group),
        group,
        heads,
        size,
        passes=(tokens.gamma.shape[-1], tokens.g.shape[-1]),
        opens=tokens.full is not None,
        resets=tokens.reset is not None,
    )
    options = {"phi": phi, "activation": activation, "interpret": interpret}
    return run(_op, layout, tokens, memory, empty, **options)


def _scratch(layout: Layout, x: Chunks) -> tuple[list[Any], list[Any]]:
    """Room for the tokens of a block's chunks; their cotangents, and memories."""
    packs, rows = layout.rows * layout.group, layout.heads * layout.size
    (key, _, value, slots) = (t.shape[4] for t in x.tokens)
    heads = layout.heads

    def room(number, width):
        return pltpu.VMEM((layout.parts, packs, number, width), F32)

    q, k, v = (room(rows, heads * width) for width in (key, key, value))
    of_slots, between = room(rows, slots), room(rows, rows)
    gammas = (of_slots,) * layout.passes[0]
    # Of single tokens these are 1.
    rest = (None, None) if layout.size == 1 else (of_slots, between)
    decays = (Decays(of_slots, *rest),) * layout.passes[1]
    parts = Part(q, k, v, of_slots, gammas, decays)
    widths = (key, key, value, slots)
    d_parts = Rows(*(room(layout.size, heads * width) for width in widths))
    memories = tuple(room(slots, heads * width) for width in (key, value))
    return [parts, d_parts.v], [parts, d_parts.v, d_parts, memories]


_op = op_of(
    forward_kernel,
    backward_kernel,
    residuals=lambda _: (F32, F32),
    scratch=_scratch,
)
