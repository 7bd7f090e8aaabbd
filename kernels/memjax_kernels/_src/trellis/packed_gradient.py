"""The gradient of one chunk of Trellis, as `packed` computes it.

Written by hand instead of by `jax.vjp`, to choose the residuals and to read transposed
operands as they are.

The gradient of a gate's sum at token i is that of the reads there less that of the
writes there: the decay factors out of both, so that no cotangent of W is formed.
"""

import functools
import math
from collections.abc import Callable, Generator
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import packs
from memjax_kernels._src.common.packs import block_diagonal, diagonal_blocks, sum_slots
from memjax_kernels._src.common.packs.blocks import LANES
from memjax_kernels._src.trellis.chunk import Options
from memjax_kernels._src.trellis.packed import (
    Chunk,
    Gates,
    Prepared,
    decay_at_end,
    head_sums,
    until_end,
)
from memjax_kernels._src.trellis.packed_functions import Write, activate_vjp, write_vjp


class Written(NamedTuple):
    """A chunk computed again up to its writes.

    Attributes:
        ready: what `packed.prepare` makes of the tokens.
        gates: of both passes.
        memories: at the chunk's start.
        d_y: cotangents of the reads.
        scores: products of q with k, and of d_y with v.
        writes: of both passes.
    """

    ready: Prepared
    gates: tuple[Gates, Gates]
    memories: tuple[Float[Array, "P M KK"], Float[Array, "P M VV"]]
    d_y: Float[Array, "P C VV"]
    scores: tuple[Float[Array, "P C CC"], Float[Array, "P C CC"]]
    writes: tuple[Write, Write]


class Cotangents(NamedTuple):
    """Of everything that `advance` takes; gates have those of gamma and of sums."""

    x: Chunk
    gamma: tuple[Array, Array]
    total: tuple[Array, Array]


def write(
    ready: Prepared,
    gates: tuple[Gates, Gates],
    memories: tuple[Float[Array, "P M KK"], Float[Array, "P M VV"]],
    d_y: Float[Array, "P C VV"],
    options: Options,
) -> Written:
    """The writes of a chunk, whose reads have the cotangents `d_y`."""

    def of_pass(index, rows, memory, keys):
        size, gamma = rows.shape[1], ready.steps[index].bounded
        # One product for what the same operand multiplies.
        rows = jnp.concatenate([rows.astype(jnp.float32), memory], axis=1)
        products = options.multiply(rows, keys, "nt")
        write = write_vjp(options, products[:, size:], ready.target, gamma)
        return products[:, :size], write

    first, u = of_pass(0, ready.x.q, memories[0], ready.k)
    second, u_values = of_pass(1, d_y, memories[1], ready.v)
    scores, writes = (first, second), (u, u_values)
    return Written(ready, gates, memories, d_y, scores, writes)


def vjp(
    chunk: Written,
    d_after: Callable[[], tuple[Array, Array]],
    options: Options,
    keep: Callable[[tuple[Array, Array]], None],
) -> Generator[None, None, Cotangents]:
    """The cotangents of a chunk, whose reads are computed again.

    `d_after` gives those of the memories after the chunk, `keep` gets those before.
    Yields between its phases; see `common.packs.staggered`.
    """
    ready, gates, (keys, values), d_y, (scores, d_scores), writes = chunk
    dot, slots = options.multiply, keys.shape[1]
    heads = len(gates[0].total.end)
    spread = functools.partial(block_diagonal, heads=heads)
    x, target, dq, dk, dv, left, steps, norms = ready
    (first, of_first), (second, of_second) = writes
    until = until_end(gates[0].total), until_end(gates[1].total)
    blocks = functools.partial(diagonal_blocks, heads=heads)

    def stack(*rows):
        return jnp.concatenate([row.astype(jnp.float32) for row in rows], axis=1)

    def of_tokens(a, b):
        # Each head's rows have its own lanes: a tile of lanes needs its heads' rows.
        tiles = math.gcd(heads, max(1, b.shape[2] // LANES))
        if tiles == 1:
            return blocks(dot(a, b, "tn"))
        rows = jnp.split(jnp.swapaxes(a, 1, 2), tiles, axis=1)
        both = rows, jnp.split(b, tiles, axis=2)
        each = [dot(*pair, "nn") for pair in zip(*both, strict=True)]
        each = [diagonal_blocks(y, heads // tiles) for y in each]
        return jnp.concatenate(each, axis=2)

    # The reads of the first pass again.
    scores = spread(scores * left[0].between)
    reads = left[0].decay * dot(keys, dq, "nt") - dot(first, scores, "nt")
    yield
    f, of_reads = activate_vjp(options, reads)
    by_token = jnp.swapaxes(f, 1, 2)
    yield
    # The second pass, with its cotangents.
    by_later = blocks(dot(by_token, second, "nn")) * left[1].between
    d_scores = spread(-d_scores * left[1].between)
    dd_y = spread(d_y)
    yield
    d_f = left[1].decay * dot(values, dd_y, "nt") + dot(second, d_scores, "nt")
    d_second = dot(f, d_scores, "nn")
    yield
    # The first pass.
    along = sum_slots(f * d_f)
    d_reads = of_reads(d_f, along)
    d_past = left[0].decay * d_reads
    yield
    d_first = dot(d_reads, scores, "nn")
    d_scores = -blocks(dot(d_reads, first, "tn")) * left[0].between
    yield
    # Cotangents of the memories, which the later chunks have computed.
    d_keys, d_values = d_after()
    d_states = -until[0] * dot(d_keys, dk, "nt"), -until[1] * dot(d_values, dv, "nt")
    d_z_values, d_target_2, gamma_2 = of_second(d_second + d_states[1])
    d_z, d_target_1, gamma_1 = of_first(d_states[0] - d_first)
    yield
    decayed = [
        decay_at_end(gate.total, d.shape[-1]) * d
        for gate, d in zip(gates, (d_keys, d_values), strict=True)
    ]
    products = dot(stack(d_z, d_scores), dk, "nn")
    before_keys = decayed[0] + products[:, :slots] + dot(d_past, dq, "nn")
    before_values = decayed[1] + dot(d_z_values, dv, "nn")
    before_values += dot(f * left[1].decay, dd_y, "nn")
    keep((before_keys, before_values))
    yield
    d_gamma_1, alike_1 = steps[0].vjp(gamma_1)
    d_gamma_2, alike_2 = steps[1].vjp(gamma_2)
    total_2 = along - steps[1].bounded * gamma_2
    total_2 += _at_end(
        sum_slots(second * d_states[1]), sum_slots(decayed[1] * values), heads
    )
    total_1 = sum_slots(d_reads * reads) - steps[0].bounded * gamma_1
    total_1 += _at_end(
        sum_slots(first * d_states[0]), sum_slots(decayed[0] * keys), heads
    )
    yield
    d_v = of_tokens(
        stack(-by_later, -second * until[1], d_z_values, *alike_2),
        stack(d_y, d_values, values, *(x.v for _ in alike_2)),
    )
    # Of the earlier key of a pair above, of the later one here.
    d_v = sum((dot(d, dv, "nn") for d in alike_2), d_v)
    yield
    d_k = of_tokens(
        stack(d_scores, -first * until[0], d_z, *alike_1),
        stack(x.q, d_keys, keys, *(x.k for _ in alike_1)),
    )
    d_k = sum((dot(d, dk, "nn") for d in alike_1), d_k)
    yield
    d_q = products[:, slots:] + of_tokens(d_past, keys)
    d_target = d_target_1 + d_target_2
    if norms:
        along = head_sums(dot, d_v * x.v, heads)
        yield
        d_v = norms[0](d_v, along)
        d_target = norms[1](d_target, sum_slots(d_target * target))
    d_alpha = packs.turned(d_target, heads)
    yield
    return Cotangents(
        Chunk(d_q, d_k, d_v, d_alpha),
        (d_gamma_1, d_gamma_2),
        (total_1, total_2),
    )


def _at_end(
    tokens: Float[Array, "P 1 CC"], memory: Float[Array, "P 1 DD"], heads: int
) -> Float[Array, "P 1 CC"]:
    """Sums of both over each head's lanes, at the head's last token."""
    width = tokens.shape[-1]
    size = width // heads
    both = zip(packs.sums(tokens, heads), packs.sums(memory, heads), strict=True)
    last = packs.within(tokens.shape, size) == size - 1
    return jnp.where(last, packs.widen([a + b for a, b in both], width), 0.0)
