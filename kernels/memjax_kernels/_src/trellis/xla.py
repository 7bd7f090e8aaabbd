"""Trellis as XLA runs it: a scan over chunks, each chunk a few matrix products."""

import functools

import jax
from jaxtyping import Array

from memjax_kernels._src.common import products
from memjax_kernels._src.common.chunks import Chunks
from memjax_kernels._src.common.steps import segment
from memjax_kernels._src.trellis import chunk as one_chunk
from memjax_kernels._src.trellis.segment import as_written, of_each_pass
from memjax_kernels._src.trellis.state import Rule


def trellis_xla(
    x: Chunks,
    memory: tuple[Array, Array],
    empty: tuple[Array, Array] | None,
    rule: Rule,
) -> tuple[tuple[Array, Array], Array]:
    """A chunk implementation; see `segment`."""
    x = as_written(x, rule)
    number, size = x.tokens[0].shape[1:3]
    # Kept memories of tiny chunks would be as large as those of all tokens.
    remat_every = min(number, max(4, 64 // size))
    dtype = products.operand_dtype(*x.tokens[:3])
    multiply = functools.partial(products.multiply, dtype=dtype)
    options = one_chunk.Options(*rule, multiply=multiply)

    # A chunk is computed again in its gradient: its memory is all that is written and
    # read, and not 30 arrays. That takes a quarter less time.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def advance(memory, tokens, gates):
        q, *tokens = tokens
        return one_chunk.advance(q, of_each_pass(*tokens, *gates), memory, options)

    return segment.scan_chunks(advance, x, memory, empty, remat_every)
