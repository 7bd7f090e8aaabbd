"""One chunk of Trellis with tokens along the lanes, two heads at once.

`chunk` has the same equations with slots along the lanes, for any leading axes. Here
arrays have a leading axis of P pairs of heads (`common.pairs`): tokens are [P, C, 2 K],
memories [P, M, 2 K], and all that has slots [P, M, 2 C]. With S = start and R = running
memory, W the decays and D(.) `pairs.diagonal`:

    first pass    z = S D(k)^T,  u = gamma E(z, t),  A = (q D(k)^T) * W
                  y1 = kept * R D(q)^T - u D(A)^T,  R' = last * R - (u * until) D(k)
    second pass   the same for z, u and R' with v;  f = activation(y1),  F = f^T
                  A = (F u) * W,  y = kept * F R - A D(v)

where t = alpha^T, E is `functions.error_gradient`, kept, until and last are the decays
since the chunk's start, until its end, and over all of it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels.common import pairs
from memjax_kernels.common.pairs import diagonal, own
from memjax_kernels.trellis import functions
from memjax_kernels.trellis.chunk import Options, Sums

F32 = jnp.float32


class Chunk(NamedTuple):
    """Tokens of one chunk."""

    q: Float[Array, "P C K2"]
    k: Float[Array, "P C K2"]
    v: Float[Array, "P C V2"]
    alpha: Float[Array, "P C M2"]


class Totals(NamedTuple):
    """Inclusive sums of g over the chunk.

    Attributes:
        row: along the lanes, [P, 1, 2 C].
        column: along the sublanes, [P, C, 1] of each head.
    """

    row: Sums
    column: tuple[Sums, Sums]


class Gates(NamedTuple):
    """Gates of one pass; both passes may have one and the same object `total`."""

    gamma: Float[Array, "P 1 C2"]
    total: Totals


class Decays(NamedTuple):
    """What the gates of a pass leave.

    Attributes:
        between: from token j (lanes) to token i, 0 for j > i.
        kept: since the chunk's start.
        until: from a token to the chunk's end.
    """

    between: Float[Array, "P C C2"]
    kept: Float[Array, "P 1 C2"]
    until: Float[Array, "P 1 C2"]


class Memory(NamedTuple):
    """The memory of a pass at the chunk's start, and the one to write to."""

    start: Float[Array, "P M D2"]
    running: Float[Array, "P M D2"]


def decays(total: Totals) -> Decays:
    """The decays of one pass."""
    row = total.row
    width = row.coarse.shape[-1]
    half = width // 2
    wide = Sums(
        *(pairs.widen(*of_both, width) for of_both in zip(*total.column, strict=True))
    )
    shape = wide.coarse.shape
    i = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    j = pairs.lane(shape)
    seen = i >= jnp.where(j < half, j, j - half)
    between = (wide.coarse - row.coarse) + (wide.fine - row.fine)
    # Masked before exp, which would overflow above the diagonal.
    between = jnp.exp(jnp.where(seen, between, -1e30))
    end = Sums(
        *(pairs.widen(x[:, :, half - 1 : half], x[:, :, -1:], width) for x in row)
    )
    until = jnp.exp((end.coarse - row.coarse) + (end.fine - row.fine))
    return Decays(between, jnp.exp(row.coarse + row.fine), until)


def both_decays(gates: tuple[Gates, Gates]) -> tuple[Decays, Decays]:
    """The decays of both passes, computed once where they are the same."""
    first, second = (gate.total for gate in gates)
    left = decays(first)
    return left, (left if second is first else decays(second))


def kept_by_token(total: Totals, width: int) -> Float[Array, "P C V2"]:
    """The decay since the chunk's start, tokens along the sublanes."""
    first, second = (jnp.exp(sums.coarse + sums.fine) for sums in total.column)
    return pairs.widen(first, second, width)


def kept_at_end(total: Totals, width: int) -> Float[Array, "P 1 D2"]:
    """The decay over the whole chunk, in a memory's lanes."""
    row = total.row.coarse + total.row.fine
    half = row.shape[-1] // 2
    ends = row[:, :, half - 1 : half], row[:, :, -1:]
    return jnp.exp(pairs.widen(*ends, width))


def targets(alpha: Float[Array, "P C M2"], options: Options):
    """alpha with slots along the sublanes: a product with ones is a transpose."""
    return options.multiply(ones_twice(alpha), diagonal(alpha), "nt")


def ones_twice(alpha):
    """The unit matrix for each head of a pair, [P, M, 2 M]."""
    shape = (alpha.shape[0], alpha.shape[-1] // 2, alpha.shape[-1])
    slot = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    lane = pairs.lane(shape)
    lane = jnp.where(pairs.first(shape), lane, lane - shape[1])
    return (slot == lane).astype(alpha.dtype)


def eye(x: Array, size: int) -> Array:
    """The unit matrix in the dtype of x, [P, size, size]."""
    shape = (x.shape[0], size, size)
    rows = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return (rows == pairs.lane(shape)).astype(x.dtype)


def advance(
    x: Chunk,
    gates: tuple[Gates, Gates],
    keys: Memory,
    values: Memory,
    options: Options,
) -> tuple[tuple[Array, Array], Float[Array, "P C V2"]]:
    """The running memories after a chunk, and its reads."""
    dot, slots = options.multiply, keys.start.shape[1]
    low = lambda y: y.astype(x.q.dtype)
    target, dk, dv = targets(x.alpha, options), diagonal(x.k), diagonal(x.v)
    first, second = both_decays(gates)
    both = dot(jnp.concatenate([low(keys.start), x.q], axis=1), dk, "nt")
    u = gates[0].gamma * _error(both[:, :slots], target, options)
    scores = low(both[:, slots:] * first.between)
    reads = first.kept * dot(keys.running, diagonal(x.q), "nt")
    reads -= dot(u, diagonal(scores), "nt")
    after_keys = kept_at_end(gates[0].total, keys.running.shape[-1]) * keys.running
    after_keys -= dot(u * first.until, dk, "nn")

    f = low(functions.apply(options.activation, reads, pairs.over_slots))
    by_token = low(dot(eye(f, f.shape[-1]), f, "nt"))
    u = gates[1].gamma * _error(dot(values.start, dv, "nt"), target, options)
    scores = own(dot(by_token, u, "nn")) * second.between
    parts = jnp.concatenate([low(scores), low(u * second.until)], axis=1)
    written = dot(parts, dv, "nn")
    size, width = x.v.shape[1:]
    past = own(dot(by_token, values.running, "nn"))
    y = kept_by_token(gates[1].total, width) * past - written[:, :size]
    after_values = (
        kept_at_end(gates[1].total, width) * values.running - written[:, size:]
    )
    return (after_keys, after_values), y


def _error(z, target, options):
    return functions.error_gradient(options.phi, z, target, pairs.over_slots)
