"""The gradient of one chunk of Lattice, as `packed` computes it.

Written by hand instead of by `jax.vjp`, to choose the recomputed values, to join
products that are summed, and to read transposed operands as they are.
"""

from collections.abc import Generator

import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common.packs import (
    block_diagonal,
    diagonal_blocks,
    lower,
    sum_heads,
)
from memjax_kernels._src.common.packs.chunk_kernels import Chunk, Cotangents
from memjax_kernels._src.lattice import packed
from memjax_kernels._src.lattice.packed import Options, sum_rounded, sum_tokens, weigh

F32 = jnp.float32


def vjp(
    x: Chunk,
    start: Float[Array, "P M VV"],
    d_after: Float[Array, "P M VV"],
    d_y: Float[Array, "P C VV"],
    options: Options,
) -> Generator[None, None, Cotangents]:
    """The cotangents of a chunk, which is computed again from its memory.

    Yields between its phases; see `common.packs.staggered`.

    The cotangents given are of the memory after the tokens, 0 where the chunk is not
    full, and of the reads.
    """
    dot, heads = options.multiply, options.heads

    def rows(*parts):
        return jnp.concatenate([part.astype(F32) for part in parts], axis=1)

    def halves(x):
        return jnp.split(x, 2, axis=1)

    slots = block_diagonal(start, heads)
    h = packed.errors(x, slots, options)
    yield
    # One matrix for the rows of both passes.
    a, d_past = halves(dot(rows(h, d_y), slots, "nt"))
    w = x.gate * packed.coefficients(x, a, options)
    apart_h, apart_w = block_diagonal(h, heads), block_diagonal(w, heads)
    yield
    pairs, d_scores = halves(dot(rows(h, d_y), apart_h, "nt"))
    pairs, d_scores = weigh(pairs, heads), lower(-d_scores, heads)
    yield
    before, d_read = halves(dot(rows(pairs, d_scores), apart_w, "nn"))
    norm = packed.norms(w, a, before, x.k.dtype)
    yield
    moved = packed.move(h, w, start, options)
    yield

    # The memory after the chunk.
    d_memory = d_after - moved.after * sum_rounded(moved.after * d_after, options)
    d_memory *= moved.inverse
    along = sum_heads(d_memory * start, heads)
    yield
    d_written = along * start - d_memory
    d_start = (1.0 + moved.along) * d_memory + along * moved.written
    apart_d = block_diagonal(d_written, heads)
    yield

    # The reads.
    q = x.q.astype(F32)
    r, d_r = q * norm.rho, d_past * (1.0 + norm.taken) + d_read
    d_norm = -0.5 * norm.rho * norm.rho * norm.rho * (d_r * q)
    d_norm = jnp.where(norm.across > 0, d_norm, 0.0)
    yield
    d_taken = d_past * r - 2.0 * norm.taken * d_norm
    sums = sum_tokens(
        jnp.concatenate([d_taken, d_norm], axis=-1), x.k.dtype, reverse=True
    )
    of_along, of_before = jnp.split(sums, 2, axis=-1)
    yield

    # The writes.
    d_before = of_before * w
    scores, d_pairs = halves(dot(rows(r, d_before), apart_w, "nt"))
    scores, d_pairs = lower(scores, heads), weigh(d_pairs, heads)
    yield
    d_w = of_along * a + of_before * before + dot(h, apart_d, "nt")
    d_w += diagonal_blocks(dot(rows(pairs, d_scores), rows(d_before, r), "tn"), heads)
    yield
    d_c = x.gate * d_w
    d_a = of_along * w
    if options.variant == "enc":
        d_a += d_c
    d_h = diagonal_blocks(dot(rows(d_pairs, scores), rows(h, -d_y), "tn"), heads)
    d_h += dot(d_pairs, apart_h, "nn")
    yield
    both = jnp.concatenate([apart_d, slots], axis=1)
    d_h += dot(jnp.concatenate([w, d_a], axis=-1), both, "nn")
    yield

    # The tokens and the memory that the errors are of.
    by_slots, by_channels = (r + r * norm.taken, d_a), (d_y, h)
    match options.variant:
        case "dec":
            d_k, d_v = d_c + dot(d_h, slots, "nt"), -d_h
            by_slots, by_channels = (*by_slots, x.k), (*by_channels, d_h)
        case "enc":
            d_k, d_v = -d_c, d_h
        case "sim":
            d_k, d_v = d_c, -d_h
    d_start += diagonal_blocks(dot(rows(*by_slots), rows(*by_channels), "tn"), heads)
    return Cotangents(
        (d_r * norm.rho, d_k, d_v), d_w * packed.coefficients(x, a, options), d_start
    )
