"""The gradient of one chunk of Trellis, as `packed` computes it.

Written by hand instead of by `jax.vjp`, to choose the residuals and to read transposed
operands as they are. `jax.vjp` is taken of phi and the activation alone.

The gradient of a gate's sum at token i is that of the reads there less that of the
writes there: the decay factors out of both, so that no cotangent of W is formed.
"""

import functools
from collections.abc import Generator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import packs
from memjax_kernels._src.common.packs import block_diagonal, diagonal_blocks, sum_slots
from memjax_kernels._src.trellis.chunk import Options
from memjax_kernels._src.trellis.packed import (
    Chunk,
    Gates,
    Prepared,
    activate,
    decay_at_end,
    error_gradient,
    eye,
    units,
    until_end,
)


class Written(NamedTuple):
    """Residuals of a pass."""

    u: Float[Array, "P M CC"]
    back: Any
    error: Float[Array, "P M CC"]


class Cotangents(NamedTuple):
    """Of everything that `advance` takes; gates have those of gamma and of sums."""

    x: Chunk
    gamma: tuple[Array, Array]
    total: tuple[Array, Array]
    keys: Float[Array, "P M KK"]
    values: Float[Array, "P M VV"]


def vjp(
    x: Chunk,
    ready: Prepared,
    gates: tuple[Gates, Gates],
    keys: Float[Array, "P M KK"],
    values: Float[Array, "P M VV"],
    d_after: tuple[Array, Array],
    d_y: Float[Array, "P C VV"],
    options: Options,
) -> Generator[None, None, Cotangents]:
    """The cotangents of a chunk, which is computed again from its memories.

    Yields between its phases; see `common.packs.staggered`.
    """
    dot, (slots, size) = options.multiply, (keys.shape[1], x.q.shape[1])
    heads = len(gates[0].total.column)
    spread = functools.partial(block_diagonal, heads=heads)
    target, dq, dk, dv, scores, left = ready
    until = until_end(gates[0].total), until_end(gates[1].total)
    blocks = functools.partial(diagonal_blocks, heads=heads)

    def stack(*rows):
        return jnp.concatenate([row.astype(jnp.float32) for row in rows], axis=1)

    d_keys, d_values = d_after

    # The first pass again.
    products = dot(stack(keys, d_keys), dk, "nt")
    first = _write(products[:, :slots], target, gates[0].gamma, options)
    state_keys = products[:, slots:]
    yield
    reads = left[0].decay * dot(keys, dq, "nt") - dot(first.u, scores, "nt")
    yield
    f, back = jax.vjp(functools.partial(activate, options), reads)
    by_token = dot(eye(f, heads * size), f, "nt")

    yield
    # The second, with its cotangents.
    products = dot(stack(values, d_values, d_y), dv, "nt")
    yield
    second = _write(products[:, :slots], target, gates[1].gamma, options)
    state_values, d_scores = products[:, slots : 2 * slots], products[:, 2 * slots :]
    yield
    written = blocks(dot(by_token, second.u, "nn")) * left[1].between
    d_scores = spread(-d_scores * left[1].between)
    yield
    dd_y = spread(d_y)
    d_f = left[1].decay * dot(values, dd_y, "nt")
    d_f += dot(second.u, d_scores, "nt")
    yield
    d_state = -until[1] * state_values
    d_u = dot(f, d_scores, "nn") + d_state
    yield
    d_z, d_target = second.back(gates[1].gamma * d_u)
    decayed = decay_at_end(gates[1].total, values.shape[-1]) * d_values
    d_values_before = decayed + dot(d_z, dv, "nn") + dot(f * left[1].decay, dd_y, "nn")
    yield
    d_v = blocks(
        dot(
            stack(-written, -second.u * until[1], d_z),
            stack(d_y, d_values, values),
            "tn",
        )
    )
    yield
    gamma_2 = sum_slots(second.error * d_u)
    total_2 = sum_slots(f * d_f) - gates[1].gamma * gamma_2
    total_2 += _at_end(
        sum_slots(second.u * d_state), sum_slots(decayed * values), heads
    )

    yield
    # The first pass.
    (d_reads,) = back(d_f)
    d_past = left[0].decay * d_reads
    yield
    d_state = -until[0] * state_keys
    d_u = d_state - dot(d_reads, scores, "nn")
    d_scores = -blocks(dot(d_reads, first.u, "tn")) * left[0].between
    yield
    d_z, d_target_1 = first.back(gates[0].gamma * d_u)
    decayed = decay_at_end(gates[0].total, keys.shape[-1]) * d_keys
    d_keys_before = decayed + dot(d_z, dk, "nn") + dot(d_past, dq, "nn")
    yield
    d_k = blocks(
        dot(
            stack(d_scores, -first.u * until[0], d_z),
            stack(x.q, d_keys, keys),
            "tn",
        )
    )
    yield
    d_q = dot(d_scores, dk, "nn") + blocks(dot(d_past, keys, "tn"))
    d_alpha = blocks(dot(d_target + d_target_1, units(x.alpha, heads), "tn"))
    yield
    gamma_1 = sum_slots(first.error * d_u)
    total_1 = sum_slots(d_reads * reads) - gates[0].gamma * gamma_1
    total_1 += _at_end(sum_slots(first.u * d_state), sum_slots(decayed * keys), heads)
    return Cotangents(
        Chunk(d_q, d_k, d_v, d_alpha),
        (gamma_1, gamma_2),
        (total_1, total_2),
        d_keys_before,
        d_values_before,
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


def _write(z, target, gamma, options: Options) -> Written:
    e, back = jax.vjp(functools.partial(error_gradient, options), z, target)
    return Written(gamma * e, back, e)
