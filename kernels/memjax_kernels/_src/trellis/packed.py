"""One chunk of Trellis with tokens along the lanes, a pack of heads at once.

`chunk` has the same equations with slots along the lanes, for any leading axes. Here
arrays have a leading axis of P packs of heads (`common.packs`): tokens are [P, C, KK],
memories [P, M, KK], and numbers of slots [P, M, CC]. With a memory S, W the decays and
D(.) `packs.block_diagonal`:

    first pass    z = S D(k)^T,  u = gamma E(z, t),  A = (q D(k)^T) * W
                  y1 = decay * S D(q)^T - u D(A)^T,  S' = last * S - (u * until) D(k)
    second pass   the same for z, u and S' with v;  f = activation(y1),  F = f^T
                  A = (F u) * W,  y = decay * F S - A D(v)

where t = alpha^T, E is `functions.error_gradient`, decay, until and last are the decays
since the chunk's start, until its end, and over all of it.
"""

from collections.abc import Generator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import packs
from memjax_kernels._src.common.packs import block_diagonal, diagonal_blocks
from memjax_kernels._src.common.packs.decays import (
    Decays,
    Totals,
    decay_at_end,
    decay_by_token,
    decays,
    until_end,
)
from memjax_kernels._src.trellis import functions
from memjax_kernels._src.trellis.chunk import Options

F32 = jnp.float32


class Chunk(NamedTuple):
    """Tokens of one chunk."""

    q: Float[Array, "P C KK"]
    k: Float[Array, "P C KK"]
    v: Float[Array, "P C VV"]
    alpha: Float[Array, "P C MM"]


class Gates(NamedTuple):
    """Gates of one pass; both passes may have one and the same object `total`."""

    gamma: Float[Array, "P 1 CC"]
    total: Totals


def targets(alpha: Float[Array, "P C MM"], heads: int, options: Options):
    """alpha with slots along the sublanes: a product with ones is a transpose."""
    return options.multiply(units(alpha, heads), block_diagonal(alpha, heads), "nt")


def units(alpha: Float[Array, "P C MM"], heads: int) -> Float[Array, "P M MM"]:
    """The unit matrix for each head of a pack."""
    slots = alpha.shape[-1] // heads
    shape = (alpha.shape[0], slots, alpha.shape[-1])
    slot = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return (slot == packs.within(shape, slots)).astype(alpha.dtype)


def eye(x: Array, size: int) -> Array:
    """The unit matrix in the dtype of x, [P, size, size]."""
    shape = (x.shape[0], size, size)
    rows = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return (rows == packs.lane(shape)).astype(x.dtype)


class Prepared(NamedTuple):
    """Values that depend on tokens and gates alone.

    Attributes:
        target: alpha with slots along the sublanes.
        q: D(q).
        k: D(k).
        v: D(v).
        scores: D(A) of the first pass.
        left: decays of both passes.
    """

    target: Float[Array, "P M CC"]
    q: Float[Array, "P CC KK"]
    k: Float[Array, "P CC KK"]
    v: Float[Array, "P CC VV"]
    scores: Float[Array, "P CC CC"]
    left: tuple[Decays, Decays]


def prepare(x: Chunk, gates: tuple[Gates, Gates], options: Options) -> Prepared:
    """The part that does not depend on memories."""
    first, second = (gate.total for gate in gates)
    heads = len(first.column)
    left = decays(first)
    # Computed once where both are the same.
    both = left, (left if second is first else decays(second))
    dq, dk, dv = (block_diagonal(y, heads) for y in (x.q, x.k, x.v))
    scores = options.multiply(x.q, dk, "nt") * left.between
    scores = block_diagonal(scores, heads)
    return Prepared(targets(x.alpha, heads, options), dq, dk, dv, scores, both)


def advance(
    x: Chunk,
    ready: Prepared,
    gates: tuple[Gates, Gates],
    keys: Float[Array, "P M KK"],
    values: Float[Array, "P M VV"],
    options: Options,
) -> Generator[None, None, tuple[tuple[Array, Array], Float[Array, "P C VV"]]]:
    """The memories after a chunk, and its reads.

    Yields between its phases; see `common.packs.staggered`.
    """
    dot, heads = options.multiply, len(gates[0].total.column)
    target, dq, dk, dv, scores, (first, second) = ready
    u = gates[0].gamma * error_gradient(options, dot(keys, dk, "nt"), target)
    yield
    reads = first.decay * dot(keys, dq, "nt") - dot(u, scores, "nt")
    yield
    after_keys = decay_at_end(gates[0].total, keys.shape[-1]) * keys
    after_keys -= dot(u * until_end(gates[0].total), dk, "nn")

    yield
    f = activate(options, reads)
    by_token = dot(eye(f, f.shape[-1]), f, "nt")
    yield
    u = gates[1].gamma * error_gradient(options, dot(values, dv, "nt"), target)
    yield
    scores = diagonal_blocks(dot(by_token, u, "nn"), heads) * second.between
    parts = [scores, u * until_end(gates[1].total)]
    yield
    written = dot(jnp.concatenate(parts, axis=1), dv, "nn")
    size, width = x.v.shape[1:]
    yield
    past = diagonal_blocks(dot(by_token, values, "nn"), heads)
    y = decay_by_token(gates[1].total, width) * past - written[:, :size]
    after_values = decay_at_end(gates[1].total, width) * values - written[:, size:]
    return (after_keys, after_values), y


def activate(options: Options, reads: Array) -> Array:
    """f of the first pass's reads, slots as rows."""
    return functions.apply(options.activation, reads, packs.over_slots, packs.sigmoid)


def error_gradient(options: Options, z: Array, target: Array) -> Array:
    """E of a memory's prediction."""
    return functions.error_gradient(
        options.phi, z, target, packs.over_slots, packs.sigmoid
    )
