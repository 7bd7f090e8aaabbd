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
from memjax_kernels._src.trellis.chunk import Options
from memjax_kernels._src.trellis.packed_functions import activate, error_gradient

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


class Prepared(NamedTuple):
    """Values that depend on tokens and gates alone.

    Attributes:
        target: alpha with slots along the sublanes.
        q: D(q).
        k: D(k).
        v: D(v).
        left: decays of both passes.
    """

    target: Float[Array, "P M CC"]
    q: Float[Array, "P CC KK"]
    k: Float[Array, "P CC KK"]
    v: Float[Array, "P CC VV"]
    left: tuple[Decays, Decays]


def prepare(x: Chunk, gates: tuple[Gates, Gates], options: Options) -> Prepared:
    """The part that does not depend on memories."""
    first, second = (gate.total for gate in gates)
    heads = len(first.column)
    left = decays(first)
    # Computed once where both are the same.
    both = left, (left if second is first else decays(second))
    dq, dk, dv = (block_diagonal(y, heads) for y in (x.q, x.k, x.v))
    return Prepared(targets(x.alpha, heads, options), dq, dk, dv, both)


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
    target, dq, dk, dv, (first, second) = ready
    size, width = x.v.shape[1:]
    # One matrix for the rows of both.
    rows = jnp.concatenate([x.q.astype(F32), keys], axis=1)
    products = dot(rows, dk, "nt")
    u = gates[0].gamma * error_gradient(options, products[:, size:], target)
    yield
    scores = block_diagonal(products[:, :size] * first.between, heads)
    reads = first.decay * dot(keys, dq, "nt") - dot(u, scores, "nt")
    yield
    after_keys = decay_at_end(gates[0].total, keys.shape[-1]) * keys
    after_keys -= dot(u * until_end(gates[0].total), dk, "nn")

    yield
    f = activate(options, reads)
    by_token = jnp.swapaxes(f, 1, 2)
    yield
    u = gates[1].gamma * error_gradient(options, dot(values, dv, "nt"), target)
    yield
    scores = diagonal_blocks(dot(by_token, u, "nn"), heads) * second.between
    parts = [scores, u * until_end(gates[1].total)]
    yield
    written = dot(jnp.concatenate(parts, axis=1), dv, "nn")
    yield
    past = diagonal_blocks(dot(by_token, values, "nn"), heads)
    y = decay_by_token(gates[1].total, width) * past - written[:, :size]
    after_values = decay_at_end(gates[1].total, width) * values - written[:, size:]
    return (after_keys, after_values), y
