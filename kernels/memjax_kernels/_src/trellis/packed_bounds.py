"""Steps of packed heads, bounded by what the keys of a chunk have in common.

`functions` has the formula. Rows are the earlier tokens s, lanes the later ones t of
each head, and the gradient of the pairs L_st = log(1 - gamma_s a_st²) is by hand, with
a_st = ⟨k_s, k_t⟩:

    dp_st = -d left_t a_st Π_r≠s (1 - gamma_r a_rt²)
    d gamma_s = Σ_t dp_st a_st        d a_st = 2 gamma_s dp_st
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import packs, products
from memjax_kernels._src.common.packs import sum_slots
from memjax_kernels._src.trellis.functions import LEAST

Row = Float[Array, "P 1 CC"]
Pairs = Float[Array, "P C CC"]


def bounded_vjp(
    alike: Pairs, gamma: Row, wide: Pairs, heads: int
) -> tuple[Row, Callable[[Row], tuple[Row, tuple[Pairs]]]]:
    """The bounded steps gamma' and their VJP, with cotangents of gamma and `alike`.

    Args:
        alike: products of a chunk's keys.
        gamma: steps along the lanes.
        wide: the same along the sublanes, in all lanes of a head.
        heads: of a pack.
    """
    token = packs.within(alike.shape, alike.shape[1])
    known = jnp.where(token > packs.sublane(alike.shape), alike, 0.0)
    logs = jnp.log(jnp.maximum(1 - wide * known * known, LEAST))
    total = sum_slots(logs)
    left = jnp.exp(total)
    # The product over all other earlier tokens.
    others = jnp.exp(total - logs) * known
    of_gamma, of_alike = others * known, 2 * wide * others

    def of_both(d):
        d_left = -d * gamma
        d_gamma = d * left + _along_lanes(d_left * of_gamma, heads)
        return d_gamma, (d_left * of_alike,)

    return gamma * left, of_both


def _along_lanes(x: Pairs, heads: int) -> Row:
    """The sum over each head's lanes of every row, at the row's place in the lanes."""
    (_, size, width), dtype = x.shape, jnp.dtype(jnp.bfloat16)
    square = width, width
    head = jax.lax.div(packs.sublane(square), jnp.int32(size))
    ones = (head == packs.head(square, heads)).astype(jnp.float32)
    # One matrix for all parts.
    parts = jnp.concatenate(packs.in_bfloat16(x.reshape(-1, width)))
    found = products.multiply(parts, ones, "nn", dtype)
    sums = functools.reduce(jnp.add, jnp.split(found, 3)).reshape(x.shape)
    here = packs.within(x.shape, size) == packs.sublane(x.shape)
    return sum_slots(jnp.where(here, sums, 0.0))
