"""One chunk of Lattice for packed heads: two matrices fill a TPU's lanes.

`chunk` has the same equations for any leading axes. Here arrays have a leading axis of
P packs of heads (`common.packs`): tokens and slots are [P, C, MM], memories [P, M, VV],
and pairs of tokens [P, C, CC]. With S = start, D(.)
`packs.block_diagonal` and T the sum over tokens up to each:

    h = k D(S) - v,  a = h D(S)^T,  c = k,  w = gamma c          ("dec"; see `errors`)
    L = 2 below the diagonal, 1 on it, of h D(h)^T
    taken = T (w a),  rho = (1 + T (w L D(w)) - taken^2)^{-1/2}
    r = q rho,  y = (r + r taken) D(S) - lower(r D(w)^T) D(h)
    A = w^T h,  M = S + |S A| S - A,  after = M / |M|

|x| are sums over a slot's channels.
"""

import functools
from collections.abc import Generator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import packs
from memjax_kernels._src.common.packs import block_diagonal, diagonal_blocks, lower
from memjax_kernels._src.common.packs.chunk_kernels import Chunk
from memjax_kernels._src.common.packs.pack_products import multiply
from memjax_kernels._src.common.products import Multiply
from memjax_kernels._src.lattice.memory import LatticeVariant
from memjax_kernels._src.lattice.sphere import inverse_norm

F32 = jnp.float32


class Options(NamedTuple):
    """Static arguments of the kernels."""

    variant: LatticeVariant
    heads: int
    multiply: Multiply


class Norms(NamedTuple):
    """Intermediates of the slots' norms after each token.

    Attributes:
        taken: what the slots lose along themselves.
        across: squared norm of what they gain across themselves.
        rho: 1 / norm.
    """

    taken: Float[Array, "P C MM"]
    across: Float[Array, "P C MM"]
    rho: Float[Array, "P C MM"]


class Moved(NamedTuple):
    """The memory after a chunk, and the residuals of its gradient.

    Attributes:
        written: A.
        along: |S A|.
        inverse: 1 / |M|, 0 for a slot of zeros.
        after: M / |M|.
    """

    written: Float[Array, "P M VV"]
    along: Float[Array, "P M VV"]
    inverse: Float[Array, "P M VV"]
    after: Float[Array, "P M VV"]


def advance(
    x: Chunk, start: Float[Array, "P M VV"], options: Options
) -> Generator[None, None, tuple[Array, Float[Array, "P C VV"]]]:
    """Takes a memory through a chunk.

    Yields between its phases; see `common.packs.staggered`.
    """
    dot, heads = options.multiply, options.heads
    slots = block_diagonal(start, heads)
    h = errors(x, slots, options)
    a = dot(h, slots, "nt")
    yield
    w = x.gate * coefficients(x, a, options)
    apart = block_diagonal(w, heads)
    yield
    pairs = weigh(dot(h, block_diagonal(h, heads), "nt"), heads)
    norm = norms(w, a, dot(pairs, apart, "nn"), x.k.dtype)
    yield
    r = x.q.astype(F32) * norm.rho
    y = dot(r + r * norm.taken, slots, "nn")
    yield
    scores = lower(dot(r, apart, "nt"), heads)
    y -= dot(scores, block_diagonal(h, heads), "nn")
    yield
    return move(h, w, start, options).after, y


def errors(
    x: Chunk, slots: Float[Array, "P MM VV"], options: Options
) -> Float[Array, "P C VV"]:
    """h of a variant's objective; `slots` is D(S).

    The gradient at slot i is c_i (h - phi(s_i) a_i).
    """
    v = x.v.astype(F32)
    match options.variant:
        case "dec":
            return options.multiply(x.k, slots, "nn") - v
        case "enc":
            return v
        case "sim":
            return -v


def coefficients(
    x: Chunk, a: Float[Array, "P C MM"], options: Options
) -> Float[Array, "P C MM"]:
    """c of a variant's objective."""
    k = x.k.astype(F32)
    return a - k if options.variant == "enc" else k


def norms(w, a, before, dtype: jnp.dtype) -> Norms:
    """The norms of the slots; `before` is L D(w), and dtype that of the tokens."""
    sums = sum_tokens(jnp.concatenate([w * a, w * before], axis=-1), dtype)
    taken, added = jnp.split(sums, 2, axis=-1)
    across = added - taken * taken
    return Norms(taken, across, inverse_norm(jnp.ones_like(across), across))


def move(h, w, start: Float[Array, "P M VV"], options: Options) -> Moved:
    """The memory after the chunk."""
    heads = options.heads
    written = diagonal_blocks(options.multiply(w, h, "tn"), heads)
    along = sum_rounded(start * written, options, 2)
    memory = start + along * start - written
    squares = packs.sum_heads(memory * memory, heads)
    filled = squares > 0
    inverse = jnp.where(filled, jax.lax.rsqrt(jnp.where(filled, squares, 1.0)), 0.0)
    return Moved(written, along, inverse, memory * inverse)


def weigh(pairs: Float[Array, "P C CC"], heads: int) -> Float[Array, "P C CC"]:
    """Pairs of a token with one before it twice, with itself once."""
    row = packs.sublane(pairs.shape)
    column = packs.within(pairs.shape, pairs.shape[-1] // heads)
    return jnp.where(row == column, pairs, jnp.where(row > column, 2 * pairs, 0.0))


def sum_rounded(
    x: Float[Array, "P M VV"], options: Options, count: int = 1
) -> Float[Array, "P M VV"]:
    """`packs.sum_heads` as a product with ones of x, split into `count` bfloat16 parts.

    Sums over lanes alone keep one unit busy while the matrix unit waits.
    """
    number, _, lanes = x.shape
    ones = jnp.ones((number, lanes // options.heads, lanes), F32)
    parts = jnp.concatenate(packs.in_bfloat16(x, count), axis=1)
    found = options.multiply(parts, block_diagonal(ones, options.heads), "nn")
    return functools.reduce(jnp.add, jnp.split(found, count, axis=1))


def sum_tokens(
    x: Float[Array, "P C L"], dtype: Any = F32, *, reverse: bool = False
) -> Float[Array, "P C L"]:
    """Sums over tokens up to each, or from each on: a product with ones.

    Ones are exact in bfloat16, and so are three parts of a float32 together: half the
    products of one in float32. Beside tokens in bfloat16 one part does: what is summed
    is of products that round as much.
    """
    size = x.shape[1]
    parts = packs.in_bfloat16(x, 1 if dtype == jnp.bfloat16 else 3)
    shape = (x.shape[0], size, size)
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    seen = (row <= packs.lane(shape)) if reverse else (row >= packs.lane(shape))
    ones = jnp.concatenate([seen.astype(F32)] * len(parts), axis=-1)
    both = ones, jnp.concatenate(parts, axis=1)
    return multiply(*both, "nn", jnp.dtype(jnp.bfloat16))
