"""Lattice as XLA runs it: a scan over chunks of matrix products, or tokens if C = 1."""

import math

import jax
from jaxtyping import Array, Float

from memjax_kernels._src.common.chunks import Chunks
from memjax_kernels._src.common.products import multiplier, operand_dtype
from memjax_kernels._src.common.steps import segment
from memjax_kernels._src.lattice import chunk
from memjax_kernels._src.lattice.memory import Rule


def lattice_xla(
    x: Chunks,
    start: Float[Array, "B H M V"],
    empty: Float[Array, "B H M V"],
    rule: Rule,
) -> tuple[Float[Array, "B H M V"], Float[Array, "B n C H V"]]:
    """A chunk implementation; see `segment`."""
    count, size = x.tokens[0].shape[1:3]
    # Products may run in bfloat16; sums over tokens stay float32 in `chunk.advance`.
    multiply = multiplier(operand_dtype(*x.tokens))

    def advance(start, tokens, gates):
        gates = jax.tree.map(lambda gate: gate[..., None], gates)
        given = chunk.Tokens(*tokens, *gates)
        if size == 1:
            return chunk.token(given, start, rule)
        return chunk.advance(given, start, rule, multiply)

    # Of chunks every fourth memory is saved: the backward pass recomputes three each.
    # Of tokens saved and recomputed memories are fewest together at the root.
    remat_every = min(4, count) if size > 1 else math.isqrt(count)
    return segment.scan_chunks(advance, x, start, empty, remat_every)
