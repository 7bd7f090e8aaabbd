"""Lattice with C = 1 on a TPU for packed heads: tokens one after the other.

A block is 16 tokens of all packs of a program, which are computed in step on the vector
unit, in float32: as exact as `chunk.token`. Two tokens are scheduled together, so that
the read of one fills the time in which the next waits for its sums.

The forward kernel also saves the memory before every block where a gradient is taken.
The backward kernel goes through the blocks in reverse and computes each again.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from memjax_kernels._src.common.packs import chunkwise
from memjax_kernels._src.common.packs.blocks import (
    BLOCK_BYTES,
    ROWS,
    divisor,
    packings,
)
from memjax_kernels._src.common.packs.chunkwise import Layout, Op, Static
from memjax_kernels._src.lattice.memory import Rule
from memjax_kernels._src.lattice.segment import Chunks
from memjax_kernels._src.lattice.tpu_token import kernels
from memjax_kernels._src.lattice.tpu_token.equations import Sums
from memjax_kernels._src.lattice.tpu_token.kernels import Rows
from memjax_kernels._src.lattice.xla import lattice_xla

F32 = jnp.float32
# Packs of a program, up to which it takes further batch elements.
PACKS = 6


def heads_of_pack(heads: int, slots: int, width: int) -> int:
    """Heads of a pack, as few as fill the lanes; 0 is none."""
    fitting = packings(heads, (slots, width), _block_bytes(slots, width))
    return min(fitting, default=0)


def _block_bytes(slots: int, width: int) -> int:
    """Estimate of the backward kernel's VMEM for one head, in bytes."""
    # In float32. Three of a memory's size for each token, two buffers of five in and
    # out, and ten in between; tokens with their cotangents.
    return 4 * (slots * width * (3 * ROWS + 20) + ROWS * 12 * (slots + width))


def lattice_tokens(
    tokens: Chunks, start: Array, empty: Array, rule: Rule, *, interpret: Any = False
) -> tuple[Array, Array]:
    """A chunk implementation where heads fill packs; see `segment`."""
    (b, _, _, number, slots), width = tokens.q.shape, tokens.v.shape[4]
    heads = heads_of_pack(number, slots, width)
    each = heads * _block_bytes(slots, width)
    group = divisor(number // heads, min(PACKS, BLOCK_BYTES // each))
    rows = min(PACKS // group, BLOCK_BYTES // (group * each))
    q, k, v, gamma, _, _, reset = tokens
    resets = reset is not None
    layout = Layout(divisor(b, rows), group, heads, 1, (1,), False, resets)
    # Every chunk is full, but those of padding, which write nothing.
    x = chunkwise.Chunks((q, k, v), (gamma,), None, reset)
    return _kernels(Static(rule, layout, interpret), x, start, empty)


def _of_rule(kernel):
    """A kernel on the vector unit alone, in float32."""

    def run(*refs, layout, options: Rule, multiply):
        kernel(*refs, layout=layout, variant=options.variant)

    return run


def _scratch(layout: Layout, x: chunkwise.Chunks) -> tuple[list[Any], list[Any]]:
    """Room for a block's tokens and rates; their cotangents, and memories."""
    packs = layout.rows * layout.group
    q, k, v = (
        pltpu.VMEM((packs, ROWS, layout.heads * t.shape[4]), F32) for t in x.tokens
    )
    rows = Rows(q, k, v, v)
    slots, width = x.tokens[0].shape[4], layout.heads * x.tokens[2].shape[4]
    memories: Any = pltpu.VMEM((ROWS + 1, packs, slots, width), F32)
    return [rows, rows.v], [rows, rows.v, rows, memories, Sums(memories, memories)]


def _in_xla(rule: Rule, x: chunkwise.Chunks, start: Array, empty: Array):
    """The function of the kernels."""
    full = jnp.ones(x.tokens[0].shape[:2], bool)
    tokens = Chunks(*x.tokens, *x.gates, g=None, full=full, reset=x.reset)
    return lattice_xla(tokens, start, empty, rule)


_kernels = chunkwise.kernels_of(
    Op(
        "lattice",
        _of_rule(kernels.forward_kernel),
        _of_rule(kernels.backward_kernel),
        _in_xla,
        residuals=lambda _: F32,
        scratch=_scratch,
    )
)
