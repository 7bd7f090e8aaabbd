"""One chunk of Trellis with tokens along the lanes, a pack of heads at once.

`chunk` has the same equations with slots along the lanes, for any leading axes. Here
arrays have a leading axis of P packs of heads (`common.packs`): tokens are [P, C, KK],
memories [P, M, KK], and all that has slots [P, M, CC]. With S = start and R = running
memory, W the decays and D(.) `packs.diagonal`:

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

from memjax_kernels.common import packs
from memjax_kernels.common.packs import diagonal, own
from memjax_kernels.common.packs.decays import (
    Decays,
    Totals,
    decays,
    kept_at_end,
    kept_by_token,
)
from memjax_kernels.trellis import functions
from memjax_kernels.trellis.chunk import Options

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


class Memory(NamedTuple):
    """The memory of a pass at the chunk's start, and the one to write to."""

    start: Float[Array, "P M DD"]
    running: Float[Array, "P M DD"]


def both_decays(gates: tuple[Gates, Gates]) -> tuple[Decays, Decays]:
    """The decays of both passes, computed once where they are the same."""
    first, second = (gate.total for gate in gates)
    left = decays(first)
    return left, (left if second is first else decays(second))


def targets(alpha: Float[Array, "P C MM"], heads: int, options: Options):
    """alpha with slots along the sublanes: a product with ones is a transpose."""
    return options.multiply(units(alpha, heads), diagonal(alpha, heads), "nt")


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


def advance(
    x: Chunk,
    gates: tuple[Gates, Gates],
    keys: Memory,
    values: Memory,
    options: Options,
) -> tuple[tuple[Array, Array], Float[Array, "P C VV"]]:
    """The running memories after a chunk, and its reads."""
    dot, slots = options.multiply, keys.start.shape[1]
    heads = len(gates[0].total.column)
    low = lambda y: y.astype(x.q.dtype)
    target = targets(x.alpha, heads, options)
    dk, dv = diagonal(x.k, heads), diagonal(x.v, heads)
    first, second = both_decays(gates)
    both = dot(jnp.concatenate([low(keys.start), x.q], axis=1), dk, "nt")
    u = gates[0].gamma * _error(both[:, :slots], target, options)
    scores = low(both[:, slots:] * first.between)
    reads = first.kept * dot(keys.running, diagonal(x.q, heads), "nt")
    reads -= dot(u, diagonal(scores, heads), "nt")
    after_keys = kept_at_end(gates[0].total, keys.running.shape[-1]) * keys.running
    after_keys -= dot(u * first.until, dk, "nn")

    f = low(functions.apply(options.activation, reads, packs.over_slots))
    by_token = low(dot(eye(f, f.shape[-1]), f, "nt"))
    u = gates[1].gamma * _error(dot(values.start, dv, "nt"), target, options)
    scores = own(dot(by_token, u, "nn"), heads) * second.between
    parts = jnp.concatenate([low(scores), low(u * second.until)], axis=1)
    written = dot(parts, dv, "nn")
    size, width = x.v.shape[1:]
    past = own(dot(by_token, values.running, "nn"), heads)
    y = kept_by_token(gates[1].total, width) * past - written[:, :size]
    after_values = (
        kept_at_end(gates[1].total, width) * values.running - written[:, size:]
    )
    return (after_keys, after_values), y


def _error(z, target, options):
    return functions.error_gradient(options.phi, z, target, packs.over_slots)
