"""One chunk of Trellis with tokens along the lanes, a pack of heads at once.

`chunk` has the same equations with slots along the lanes, for any leading axes. Here
arrays have a leading axis of P packs of heads (`common.packs`): tokens are [P, C, KK],
memories [P, M, KK], and numbers of slots [P, M, CC]. With a memory S, W the decays and
D(.) `packs.block_diagonal`:

    first pass    z = S D(k)^T,  u = gamma E(z, t),  A = (q D(k)^T) * W
                  y1 = decay * S D(q)^T - u D(A)^T,  S' = last * S - (u * until) D(k)
    second pass   the same for z, u and S' with v;  f = activation(y1)
                  A = (f^T D(u)) * W,  y = (f * decay)^T D(S) - A D(v)

where transposes are those of each head, t = alpha^T, E is `functions.error_gradient`,
decay, until and last are the decays since the chunk's start, until its end, and over
all of it.
"""

import functools
import math
from collections.abc import Callable, Generator
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import packs
from memjax_kernels._src.common.packs import block_diagonal, sum_slots
from memjax_kernels._src.common.packs.blocks import LANES
from memjax_kernels._src.common.packs.decays import (
    Decays,
    Totals,
    decay_at_end,
    decays,
    until_end,
)
from memjax_kernels._src.common.products import Multiply
from memjax_kernels._src.trellis.chunk import Options
from memjax_kernels._src.trellis.packed_bounds import bounded_vjp
from memjax_kernels._src.trellis.packed_functions import (
    Divided,
    Write,
    activate_vjp,
    unit_vjp,
    write_vjp,
)

F32 = jnp.float32


class Chunk(NamedTuple):
    """Tokens of one chunk."""

    q: Float[Array, "P C KK"]
    k: Float[Array, "P C KK"]
    v: Float[Array, "P C VV"]
    alpha: Float[Array, "P C MM"]


class Gates(NamedTuple):
    """Gates of one pass; both passes may have one and the same object `total`.

    `wide` is gamma along the sublanes, in all lanes of a head, where it is bounded.
    """

    gamma: Float[Array, "P 1 CC"]
    total: Totals
    wide: Float[Array, "P C CC"] | None


class Steps(NamedTuple):
    """Steps as a pass takes them.

    Attributes:
        bounded: along the lanes.
        vjp: from their cotangent to that of gamma and, for bounded steps, that of the
            inner products of the chunk's keys, [P, C, CC].
    """

    bounded: Float[Array, "P 1 CC"]
    vjp: Callable[[Array], tuple[Array, tuple[Array, ...]]]


class Prepared(NamedTuple):
    """Values that depend on tokens and gates alone.

    Attributes:
        x: the tokens, with values divided by their norms where that is asked for.
        target: alpha with slots along the sublanes, divided likewise.
        q: D(q).
        k: D(k).
        v: D(v).
        left: decays of both passes.
        steps: of both passes.
        norms: VJPs of both divisions, of values and of targets, if there are any.
    """

    x: Chunk
    target: Float[Array, "P M CC"]
    q: Float[Array, "P CC KK"]
    k: Float[Array, "P CC KK"]
    v: Float[Array, "P CC VV"]
    left: tuple[Decays, Decays]
    steps: tuple[Steps, Steps]
    norms: tuple[Divided, ...]


def prepare(
    x: Chunk, gates: tuple[Gates, Gates], options: Options
) -> Generator[None, None, Prepared]:
    """The part that does not depend on memories; yields between its phases."""
    first, second = (gate.total for gate in gates)
    dot, heads, norms = options.multiply, len(first.end), ()
    if options.normalize:
        squares = head_sums(dot, jnp.square(x.v.astype(F32)), heads)
        yield
        v, of_v = unit_vjp(x.v, squares)
        x, norms = x._replace(v=v), (of_v,)
    left = decays(first.row, first.wide, heads)
    # Computed once where both are the same.
    same = second is first
    both = left, left if same else decays(second.row, second.wide, heads)
    dq, dk, dv = (block_diagonal(y, heads) for y in (x.q, x.k, x.v))

    def steps(k, dk, gate):
        if gate.wide is None:
            return Steps(gate.gamma, lambda d: (d, ()))
        return Steps(*bounded_vjp(dot(k, dk, "nt"), gate.gamma, gate.wide, heads))

    of_both = steps(x.k, dk, gates[0]), steps(x.v, dv, gates[1])
    target = packs.turned(x.alpha, heads).astype(F32)
    if options.normalize:
        squares = sum_slots(target * target)
        target, of_target = unit_vjp(target, squares, target.shape[1] ** 0.5)
        norms += (of_target,)
    return Prepared(x, target, dq, dk, dv, both, of_both, norms)


def head_sums(dot, x, heads: int) -> Array:
    """The sum over a head's channels, in all of them."""
    ones = jnp.ones((len(x), x.shape[-1] // heads, x.shape[-1]), F32)
    return by_tiles(dot, x, ones, heads)


def by_tiles(dot, x, y, heads: int) -> Array:
    """x D(y): in a tile of lanes of the rows of its heads, as others are zero."""
    tiles = math.gcd(heads, max(1, y.shape[-1] // LANES))
    pairs = zip(jnp.split(x, tiles, -1), jnp.split(y, tiles, -1), strict=True)
    found = [dot(a, block_diagonal(b, heads // tiles), "nn") for a, b in pairs]
    return jnp.concatenate(found, axis=-1)


def after(
    ready: Prepared,
    gates: tuple[Gates, Gates],
    memories: tuple[Float[Array, "P M KK"], Float[Array, "P M VV"]],
    written: tuple[Write, Write],
    dot: Multiply,
) -> tuple[Float[Array, "P M KK"], Float[Array, "P M VV"]]:
    """The memories after a chunk."""

    def of_pass(index, keys):
        (u, _), total = written[index], gates[index].total
        decayed = decay_at_end(total, keys.shape[-1]) * memories[index]
        return decayed - dot(u * until_end(total), keys, "nn")

    return of_pass(0, ready.k), of_pass(1, ready.v)


def advance(
    ready: Prepared,
    gates: tuple[Gates, Gates],
    keys: Float[Array, "P M KK"],
    values: Float[Array, "P M VV"],
    options: Options,
    keep: Callable[[tuple[Array, Array]], None],
) -> Generator[None, None, Float[Array, "P C VV"]]:
    """The reads of a chunk; `keep` gets the memories after it, as early as they are.

    Yields between its phases; see `common.packs.staggered`.
    """
    dot, heads = options.multiply, len(gates[0].total.end)
    x, target, dq, dk, dv, (first, second), steps, _ = ready
    spread = functools.partial(block_diagonal, heads=heads)

    products = dot(jnp.concatenate([x.q.astype(F32), keys], axis=1), dk, "nt")
    scores, z = products[:, : x.q.shape[1]], products[:, x.q.shape[1] :]
    past = dot(keys, dq, "nt")
    z_values = dot(values, dv, "nt")
    u, of_u = write_vjp(options, z, target, steps[0].bounded)
    u_values, of_values = write_vjp(options, z_values, target, steps[1].bounded)
    yield
    written = (u, of_u), (u_values, of_values)
    keep(after(ready, gates, (keys, values), written, dot))
    yield
    reads = first.decay * past - dot(u, spread(scores * first.between), "nt")
    yield
    f = activate_vjp(options, reads)[0]
    by_token, decayed = packs.turned(f, heads), packs.turned(f * second.decay, heads)
    yield
    scores = dot(by_token, spread(u_values), "nn") * second.between
    past = by_tiles(dot, decayed, values, heads)
    yield
    return past - dot(scores, dv, "nn")
