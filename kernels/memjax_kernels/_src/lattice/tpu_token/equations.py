"""Lattice with C = 1: a token of several packs of heads, and its gradient.

`chunk.token` has the same equations. Here two heads fill a register's lanes. A sum over
a head's channels is in all of the head's lanes, where it is needed next; so is every
number of a slot.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import packs
from memjax_kernels._src.lattice.memory import LatticeVariant
from memjax_kernels._src.lattice.packed import sum_channels

F32 = jnp.float32
# A smaller squared norm is that of a slot of zeros.
LEAST = 1e-37


class Token(NamedTuple):
    """A token of P packs; a number of each slot stands in all lanes of its head."""

    q: Float[Array, "P M VV"]
    k: Float[Array, "P M VV"]
    v: Float[Array, "P 1 VV"]
    gamma: Float[Array, "P 1 VV"]


class Sums(NamedTuple):
    """Sums over channels that the gradient of a token needs again.

    Attributes:
        along: of every slot and h.
        inverse: 1 / norm of every slot after the write.
    """

    along: Float[Array, "P M VV"]
    inverse: Float[Array, "P M VV"]


class Moved(NamedTuple):
    """A token's write: the names of `move`."""

    h: Float[Array, "P 1 VV"]
    c: Float[Array, "P M VV"]
    write: Float[Array, "P M VV"]
    sums: Sums
    memory: Float[Array, "P M VV"]


def move(
    x: Token,
    start: Float[Array, "P M VV"],
    variant: LatticeVariant,
    heads: int,
    sums: Sums | None = None,
) -> Moved:
    """Writes a token: eqs. 13 and 14, 16 or 18; `sums` where they are known."""
    total = functools.partial(sum_channels, heads=heads)
    match variant:
        case "dec":
            h = packs.sum_slots(x.k * start) - x.v
        case "enc":
            h = x.v
        case "sim":
            h = -x.v
    along = total(start * h) if sums is None else sums.along
    c = along - x.k if variant == "enc" else x.k
    write = x.gamma * c
    memory = start + (write * along) * start - write * h
    if sums is None:
        # A slot of zeros stays.
        squares = jnp.maximum(total(memory * memory), LEAST)
        sums = Sums(along, jax.lax.rsqrt(squares))
    return Moved(h, c, write, sums, memory)


def norms(moved: Moved, heads: int):
    """Of h and of the part of a write across its slot, and 1 / norm of the slot."""
    squares = sum_channels(moved.h * moved.h, heads)
    # Squared norms: the second follows from the first.
    across = squares - moved.sums.along * moved.sums.along
    size = jnp.maximum(moved.write * moved.write * across, 0.0)
    return across, jax.lax.rsqrt(1.0 + size)


def advance(
    x: Token, start: Float[Array, "P M VV"], variant: LatticeVariant, heads: int
) -> tuple[Float[Array, "P M VV"], Float[Array, "P 1 VV"]]:
    """The memory after a token, and its read."""
    moved = move(x, start, variant, heads)
    _, rho = norms(moved, heads)
    y = packs.sum_slots(x.q * rho * moved.memory)
    return moved.memory * moved.sums.inverse, y


def vjp(
    x: Token,
    start: Float[Array, "P M VV"],
    sums: Sums,
    d_after: Float[Array, "P M VV"],
    d_y: Float[Array, "P 1 VV"],
    variant: LatticeVariant,
    heads: int,
) -> tuple[Token, Float[Array, "P M VV"]]:
    """Cotangents of a token and of the memory before it.

    Those of q, k and gamma are parts, whose sum over a head's lanes they are.
    """
    total = functools.partial(sum_channels, heads=heads)
    moved = move(x, start, variant, heads, sums)
    h, c, write, (along, inverse), memory = moved
    across, rho = norms(moved, heads)
    # The read.
    read = memory * d_y
    d_size = -0.5 * rho * rho * rho * (x.q * total(read))
    d_size = jnp.where(across > 0, write * d_size, 0.0)
    d_write, d_along = 2.0 * across * d_size, -2.0 * along * write * d_size
    d_squares = packs.sum_slots(write * d_size)
    # The memory after the token; a slot of zeros has no direction.
    after = memory * inverse
    inverse = jnp.where(inverse < 0.5 * LEAST**-0.5, inverse, 0.0)
    d_memory = inverse * (d_after - after * total(after * d_after))
    d_memory += x.q * rho * d_y
    of_start = total(d_memory * start)
    d_write += along * of_start - total(d_memory * h)
    d_along += write * of_start
    d_start = d_memory * (1.0 + write * along) + d_along * h
    d_h = packs.sum_slots(d_along * start - write * d_memory) + 2.0 * h * d_squares
    # The rate and the errors.
    first = packs.within((1, 1, h.shape[-1]), h.shape[-1] // heads) == 0
    d_gamma = jnp.where(first, packs.sum_slots(c * d_write), 0.0)
    d_c = x.gamma * d_write
    once = jnp.where(first, d_c, 0.0)
    match variant:
        case "dec":
            d_k, d_v, d_start = start * d_h + once, -d_h, d_start + x.k * d_h
        case "enc":
            d_k, d_v = -once, d_h + packs.sum_slots(d_c * start)
            d_start += d_c * x.v
        case "sim":
            d_k, d_v = once, -d_h
    return Token(rho * read, d_k, d_v, d_gamma), d_start


def slots_of_rows(
    row: Float[Array, "P 1 MM"], width: int, heads: int, count: int
) -> Float[Array, "P M VV"]:
    """A number of each head and slot, in all `width` lanes of the head."""
    chosen, ones = _diagonals(row.shape[-1], width, heads)
    return _times_ones(jnp.where(chosen, row, 0.0), ones, count)


def rows_of_slots(
    x: Float[Array, "P M VV"], width: int, heads: int, count: int
) -> Float[Array, "P 1 MM"]:
    """The transpose of `slots_of_rows`."""
    chosen, ones = _diagonals(width, x.shape[-1], heads)
    return packs.sum_slots(jnp.where(chosen, _times_ones(x, ones.T, count), 0.0))


def _diagonals(lanes: int, width: int, heads: int):
    """Where lanes of [1, M, MM] are of the row's slot, of [MM, VV] of one head."""
    wide = (1, lanes // heads, lanes)
    chosen = packs.sublane(wide) == packs.within(wide, lanes // heads)
    row = jax.lax.broadcasted_iota(jnp.int32, (lanes, width), 0)
    of = jax.lax.div(row, jnp.int32(lanes // heads))
    return chosen, of == packs.head((lanes, width), heads)


def _times_ones(x: Float[Array, "P M L"], ones: Array, count: int) -> Array:
    """A product with zeros and ones, of x in so many parts of bfloat16."""
    parts = jnp.concatenate(packs.in_bfloat16(x, count), axis=-1)
    flat = parts.reshape(-1, parts.shape[-1]).astype(jnp.bfloat16)
    ones = jnp.concatenate([ones.astype(F32)] * count).astype(jnp.bfloat16)
    product = jax.lax.dot(flat, ones, preferred_element_type=F32)
    return product.reshape(*x.shape[:2], -1)
