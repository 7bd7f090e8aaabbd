"""Trellis as XLA runs it: a scan over chunks, each chunk a few matrix products."""

import functools

import jax.numpy as jnp
from jaxtyping import Array

from memjax_kernels._src.common import chunks, products
from memjax_kernels._src.trellis import chunk as one_chunk
from memjax_kernels._src.trellis.segment import Tokens
from memjax_kernels._src.trellis.state import Memories


def trellis_xla(
    tokens: Tokens,
    memories: Memories,
    empty: tuple[Array, ...] | None,
    *,
    phi: str,
    activation: str,
    remat_every: int | None = None,
) -> tuple[Memories, Array]:
    """A chunk implementation; see `segment`.

    Every `remat_every`-th memory is saved for the backward pass; None is 4, or more
    where chunks are so small that these are not 64 tokens.
    """
    number, size = tokens.q.shape[1:3]
    # Kept memories of tiny chunks would be as large as those of all tokens.
    remat_every = remat_every or max(4, 64 // size)
    dtype = products.operand_dtype(tokens.q, tokens.k, tokens.v)
    multiply = functools.partial(products.multiply, dtype=dtype)
    options = one_chunk.Options(phi, activation, multiply)

    def one_chunk_after(memories, item):
        tokens, full, reset = item
        return one_chunk.advance(tokens, memories, empty, full, reset, options)

    def flag(x):
        # [B, n] -> [n, B, 1, 1, 1]
        return x if x is None else x.T.astype(jnp.float32)[..., None, None, None]

    # [B, n, C, H, D] -> [n, B, H, C, D]
    def chunks_first(x):
        return jnp.moveaxis(x, (1, 3), (0, 2))

    # One gate may be for both.
    def of_each_pass(x):
        return (chunks_first(x[..., 0]), chunks_first(x[..., -1]))

    chunk = one_chunk.Chunk(
        chunks_first(tokens.q),
        (chunks_first(tokens.k), chunks_first(tokens.v)),
        chunks_first(tokens.alpha),
        of_each_pass(tokens.gamma),
        of_each_pass(tokens.g),
    )
    memories, y = chunks.scan(
        one_chunk_after,
        memories,
        (chunk, flag(tokens.full), flag(tokens.reset)),
        remat_every=min(remat_every, number),
    )
    return memories, jnp.moveaxis(y, (0, 2), (1, 3)).astype(tokens.v.dtype)
