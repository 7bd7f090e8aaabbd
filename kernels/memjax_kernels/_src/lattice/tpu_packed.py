"""Lattice on a TPU for packed heads.

`packed` and `packed_gradient` have the equations of a chunk, `common.packs.chunkwise`
the kernels. The memory is saved for gradients in the dtype of the tokens, to which the
operands of products are rounded anyway.
"""

import functools
from typing import Any

from jaxtyping import Array

from memjax_kernels._src.common.packs import chunkwise
from memjax_kernels._src.common.packs.blocks import packings
from memjax_kernels._src.common.packs.chunk_kernels import Equations, op_of
from memjax_kernels._src.common.products import Multiply
from memjax_kernels._src.lattice import packed, packed_gradient
from memjax_kernels._src.lattice.memory import Rule
from memjax_kernels._src.lattice.packed import Options
from memjax_kernels._src.lattice.segment import Chunks
from memjax_kernels._src.lattice.xla import lattice_xla

# Phases by which a group of rows is behind the one before it, counted for a v5e.
LAGS = 2, 7


def heads_of_pack(size: int, heads: int, slots: int, width: int) -> int:
    """Heads of a pack, as few as fill the lanes; 0 is none."""
    each = _block_bytes(size, slots, width)
    return min(packings(heads, (slots, width), each), default=0)


def _block_bytes(size: int, slots: int, width: int) -> int:
    """Estimate of the backward kernel's VMEM for one head, in bytes."""
    # In float32. Two buffers of each block in and out: tokens and their cotangents, and
    # 10 of a memory; and the values in between: 8 arrays of a memory, 20 of a token's
    # slots, 6 of its channels, 4 of pairs of tokens.
    tokens = size * (2 * slots + 2 * width) * 4
    memories = slots * width * (10 + 8)
    between = size * (20 * slots + 6 * width + 4 * size)
    return 4 * (tokens + memories + between)


def lattice_packed(
    tokens: Chunks, start: Array, empty: Array, rule: Rule, *, interpret: Any = False
) -> tuple[Array, Array]:
    """A chunk implementation where heads fill packs; see `segment`."""
    (*_, size, heads, slots), width = tokens.q.shape, tokens.v.shape[4]
    q, k, v, gamma, _, full, reset = tokens
    return _run(
        chunkwise.Chunks((q, k, v), (gamma,), full, reset),
        start,
        empty,
        rule,
        heads_of_pack(size, heads, slots, width),
        _block_bytes(size, slots, width),
        interpret,
    )


def _equations(rule: Rule, heads: int, multiply: Multiply) -> Equations:
    options = Options(rule.variant, heads, multiply)
    advance = functools.partial(packed.advance, options=options)
    vjp = functools.partial(packed_gradient.vjp, options=options)
    return Equations(advance, vjp, LAGS)


def _in_xla(rule: Rule, x: chunkwise.Chunks, start: Array, empty: Array):
    """The function of the kernels."""
    tokens = Chunks(*x.tokens, *x.gates, g=None, full=x.full, reset=x.reset)
    return lattice_xla(tokens, start, empty, rule)


_run = op_of("lattice", _equations, _in_xla, residuals=lambda dtype: dtype)
