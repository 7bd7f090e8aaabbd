"""Trellis as XLA runs it: a scan over chunks, each chunk a few matrix products."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from memjax_kernels._src.common import chunks, products
from memjax_kernels._src.common.steps import open_chunk
from memjax_kernels._src.trellis import chunk as one_chunk
from memjax_kernels._src.trellis.segment import (
    Tokens,
    of_each_pass,
    with_bounded_steps,
)


def trellis_xla(
    tokens: Tokens,
    memory: tuple[Array, Array],
    empty: tuple[Array, Array] | None,
    *,
    phi: str,
    activation: str,
    bound_steps: bool = False,
    remat_every: int | None = None,
) -> tuple[tuple[Array, Array], Array]:
    """A chunk implementation; see `segment`.

    Every `remat_every`-th memory is saved for the backward pass; None is 4, or more
    where chunks are so small that these are not 64 tokens.
    """
    if bound_steps:
        tokens = with_bounded_steps(tokens)
    number, size = tokens.q.shape[1:3]
    # Kept memories of tiny chunks would be as large as those of all tokens.
    remat_every = remat_every or max(4, 64 // size)
    dtype = products.operand_dtype(tokens.q, tokens.k, tokens.v)
    multiply = functools.partial(products.multiply, dtype=dtype)
    options = one_chunk.Options(phi, activation, multiply)

    def one_chunk_after(memory, item):
        q, chunk, full, reset = item
        if reset is not None:
            memory = open_chunk.replace(reset, empty, memory)
        after, y = one_chunk.advance(q, chunk, memory, options)
        # A chunk that stays open leaves the memory at its start.
        return after if full is None else open_chunk.replace(full, after, memory), y

    # [B, n, C, H, ...] -> [n, B, H, C, ...]
    def chunks_first(x):
        return jnp.moveaxis(x, (1, 3), (0, 2))

    q = chunks_first(tokens.q)
    chunk = jax.tree.map(chunks_first, of_each_pass(tokens))
    flags = jax.tree.map(jnp.transpose, (tokens.full, tokens.reset))
    memory, y = chunks.scan(
        # A chunk is computed again in its gradient: its memory is all that is written
        # and read, and not 30 arrays. That takes a quarter less time.
        jax.checkpoint(one_chunk_after, prevent_cse=False),
        memory,
        (q, chunk, *flags),
        remat_every=min(remat_every, number),
    )
    return memory, jnp.moveaxis(y, (0, 2), (1, 3)).astype(tokens.v.dtype)
