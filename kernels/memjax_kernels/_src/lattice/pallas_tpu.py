"""Lattice on a TPU: the memory stays in fast memory (VMEM), forward and backward.

`packed` and `packed_gradient` have the equations of a chunk, `common.packs.chunkwise`
the kernels. Where a gradient is taken, the memories that the forward kernel saves are
named "lattice_tpu_chunk_states" and the reads "lattice_tpu_reads": with a
rematerialisation policy that saves both, the forward kernel runs once. Memories are
saved in the dtype of the tokens, to which the operands of products are rounded anyway.
"""

import functools
from typing import Any

from jaxtyping import Array

from memjax_kernels._src.common.chunks import Chunks
from memjax_kernels._src.common.packs.blocks import ROWS, other_dtypes, packings
from memjax_kernels._src.common.packs.chunk_kernels import Equations, op_of
from memjax_kernels._src.common.products import Multiply
from memjax_kernels._src.lattice import packed, packed_gradient
from memjax_kernels._src.lattice.memory import Rule
from memjax_kernels._src.lattice.packed import Options
from memjax_kernels._src.lattice.xla import lattice_xla

# Phases by which a group of rows is behind the one before it, counted for a v5e.
LAGS = 2, 7


def unsupported(q: Array, k: Array, v: Array, chunk_size: int, rule: Rule) -> str:
    """Why the kernels cannot take these arguments on any TPU; "" if they can."""
    if reason := other_dtypes(q, k, v):
        return reason
    if not rule.normalize:
        return f"normalize must be True, got {rule.normalize}"
    if rule.forget is not None:
        return f"forget must be None, got {rule.forget!r}"
    if chunk_size % ROWS:
        return f"chunk_size must be a multiple of {ROWS}, got {chunk_size}"
    (_, _, heads, slots), width = q.shape, v.shape[-1]
    if not heads_of_pack(chunk_size, heads, slots, width):
        return (
            f"no number of {heads} heads of {slots} slots and {width} channels fills "
            "rows of 128 each and fits in VMEM"
        )
    return ""


def lattice_tpu(
    x: Chunks, start: Array, empty: Array, rule: Rule, *, interpret: Any = False
) -> tuple[Array, Array]:
    """A chunk implementation; see `segment`; `interpret` as in `pallas_call`."""
    (*_, size, heads, slots), width = x.tokens[0].shape, x.tokens[2].shape[-1]
    heads = heads_of_pack(size, heads, slots, width)
    if not heads:
        # A device's share of the heads may fill no register.
        return lattice_xla(x, start, empty, rule)
    x, each = x._replace(gates=x.gates[:1]), _block_bytes(size, slots, width)
    return _run(x, start, empty, rule, heads, each, interpret)


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


def _equations(rule: Rule, heads: int, multiply: Multiply) -> Equations:
    options = Options(rule.variant, heads, multiply)
    advance = functools.partial(packed.advance, options=options)
    vjp = functools.partial(packed_gradient.vjp, options=options)
    return Equations(advance, vjp, LAGS)


def _in_xla(rule: Rule, x: Chunks, start: Array, empty: Array):
    """The function of the kernels."""
    return lattice_xla(x._replace(gates=(*x.gates, None)), start, empty, rule)


_run = op_of("lattice", _equations, _in_xla, residuals=lambda dtype: dtype)
