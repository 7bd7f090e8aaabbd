"""Lattice as XLA runs it: a scan over chunks of matrix products, or tokens if C = 1."""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import chunks
from memjax_kernels._src.common.products import multiplier, operand_dtype
from memjax_kernels._src.common.steps import open_chunk
from memjax_kernels._src.lattice import chunk
from memjax_kernels._src.lattice.memory import Rule
from memjax_kernels._src.lattice.segment import Chunks


def lattice_xla(
    tokens: Chunks,
    start: Float[Array, "B H M V"],
    empty: Float[Array, "B H M V"],
    rule: Rule,
) -> tuple[Float[Array, "B H M V"], Float[Array, "B n C H V"]]:
    """A chunk implementation; see `segment`."""
    count, size = tokens.q.shape[1:3]
    form = _chunk if size > 1 else _token
    # Of chunks every fourth memory is saved: the backward pass recomputes three each.
    # Of tokens saved and recomputed memories are fewest together at the root.
    remat_every = min(4, count) if size > 1 else math.isqrt(count)
    return _scan(
        functools.partial(form, rule=rule, empty=empty), tokens, start, remat_every
    )


def _scan(step, tokens, memory, remat_every):
    """Scans [B, n, C, H, ...] as n items [B, H, C, ...] with flags [B]."""

    def chunk_first(x):
        return jnp.moveaxis(x, (1, 3), (0, 2))

    items = chunk.Tokens(
        *map(chunk_first, (tokens.q, tokens.k, tokens.v)),
        gamma=chunk_first(tokens.gamma[..., None]),
        g=None if tokens.g is None else chunk_first(tokens.g[..., None]),
    )
    flags = jax.tree.map(jnp.transpose, (tokens.full, tokens.reset))
    memory, y = chunks.scan(step, memory, (items, *flags), remat_every=remat_every)
    return memory, jnp.moveaxis(y, (0, 2), (1, 3))


def _clear(start, reset, empty):
    return start if reset is None else open_chunk.where(reset, empty, start)


def _chunk(start, item, *, rule, empty):
    tokens, full, reset = item
    start = _clear(start, reset, empty)
    multiply = multiplier(operand_dtype(tokens.q, tokens.k, tokens.v))
    # Products may run in bfloat16; sums over tokens stay float32 in `advance`.
    after, y = chunk.advance(tokens, start, rule, multiply)
    # A chunk that stays open leaves the memory at its start.
    return open_chunk.where(full, after, start), y.astype(tokens.v.dtype)


def _token(start, item, *, rule, empty):
    tokens, _, reset = item
    start = _clear(start, reset, empty)
    after, y = chunk.token(tokens, start, rule)
    return after, y.astype(tokens.v.dtype)
