"""Lattice as XLA runs it: a scan over chunks of matrix products, or tokens if C = 1."""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import chunks
from memjax_kernels._src.common.products import multiplier, operand_dtype
from memjax_kernels._src.lattice import chunk
from memjax_kernels._src.lattice.memory import Rule
from memjax_kernels._src.lattice.segment import Chunks, Memory


def lattice_xla(
    tokens: Chunks,
    start: Float[Array, "B H M V"],
    empty: Float[Array, "B H M V"],
    rule: Rule,
) -> tuple[Memory, Float[Array, "B n C H V"]]:
    """A chunk implementation; see `segment`."""
    b, h = start.shape[:2]
    # Nothing is pending: open chunks of an earlier call go through `lattice_xla_head`.
    memory = start, jnp.zeros_like(start), jnp.ones((b, h), jnp.float32)
    count, size = tokens.q.shape[1:3]
    if size > 1:
        step = functools.partial(_chunk, rule=rule, empty=empty, entering=False)
        # Every fourth memory is saved: the backward pass recomputes three chunks each.
        return _scan(step, tokens, memory, remat_every=min(4, count))
    step = functools.partial(_token, rule=rule, empty=empty)
    # Kept and recomputed states are fewest together at the root.
    start, y = _scan(step, tokens, start, remat_every=math.isqrt(count))
    return (start, memory[1], memory[2]), y


def lattice_xla_head(
    tokens: Chunks, memory: Memory, empty: Float[Array, "B H M V"], rule: Rule
) -> tuple[Memory, Float[Array, "B n C H V"]]:
    """One chunk, of which a part may be pending from an earlier call."""
    step = functools.partial(_chunk, rule=rule, empty=empty, entering=True)
    return _scan(step, tokens, memory, remat_every=1)


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
    if reset is None:
        return start
    return jnp.where(reset[:, None, None, None], empty, start)


def _chunk(memory, item, *, rule, empty, entering):
    """One chunk; `entering` says that something may be pending before it."""
    tokens, full, reset = item
    start, pending, decay = memory
    start = _clear(start, reset, empty)
    open_chunk = (pending, decay[..., None, None]) if entering else None
    multiply = multiplier(operand_dtype(tokens.q, tokens.k, tokens.v))
    # Products may run in bfloat16; sums over tokens stay float32 in `advance`.
    written, y = chunk.advance(tokens, start, open_chunk, rule, multiply)
    left, decay_factor = written.pending, written.decay[..., 0, 0]
    if not entering:
        # Only a chunk without tokens follows one that is not full.
        left, decay_factor = pending + left, decay * decay_factor
    done = full[:, None]
    memory = (
        jnp.where(done[..., None, None], written.after, start),
        jnp.where(done[..., None, None], 0.0, left),
        jnp.where(done, 1.0, decay_factor),
    )
    return memory, y.astype(tokens.v.dtype)


def _token(start, item, *, rule, empty):
    tokens, _, reset = item
    start = _clear(start, reset, empty)
    after, y = chunk.token(tokens, start, rule, chunk.PRODUCTS)
    return after, y.astype(tokens.v.dtype)
