"""How much of what one token wrote is left when another reads, inside a chunk.

What is left between token j and token i is the product of the factors of tokens j+1
to i. It is put together from products over halves of blocks of 2, 4, 8 ... tokens:
a pair (i, j) lies in the late and the early half of exactly one block, so its product
is one over the late half's tokens up to i times one over the early half's after j.
Nothing is divided and no two sums are subtracted: factors of 0, or e^-1e4, forget
without harm to what comes after them, and every gradient is finite.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Decays(NamedTuple):
    """Products of factors in a chunk of C tokens, a power of two.

    Attributes:
        early: for blocks of 2, 4 ... C tokens, the product after each token of a
            block's early half to that half's end, [..., C/2s, s, D].
        late: likewise, from the start of a late half up to and with each token.
        since: from the chunk's start up to and with each token.
        until: after each token to the chunk's end.
    """

    early: list[Float[Array, "..."]]
    late: list[Float[Array, "..."]]
    since: Float[Array, "*B C D"]
    until: Float[Array, "*B C D"]


def products(factors: Float[Array, "*B C D"]) -> Decays:
    """Multiplies factors, in [0, 1], over the halves of all blocks of a chunk."""
    since, until = factors, jnp.ones_like(factors)
    early, late = [], []
    for half in _halves(factors.shape[-2]):
        (since_a, since_b), (until_a, until_b) = (
            _split(since, half),
            _split(until, half),
        )
        early.append(until_a)
        late.append(since_b)
        since = _join(since_a, since_a[..., -1:, :] * since_b)
        until = _join(until_a * since_b[..., -1:, :], until_b)
    return Decays(early, late, since, until)


def matrix(decays: Decays) -> Float[Array, "*B C C"]:
    """What is left at i of token j, for one channel; zero for j > i."""
    blocks = jnp.ones((*decays.since.shape[:-1], 1, 1), decays.since.dtype)
    for early, late in zip(decays.early, decays.late, strict=True):
        blocks = _enclose(blocks, late * jnp.swapaxes(early, -1, -2))
    return blocks[..., 0, :, :]


def scores(
    q: Float[Array, "*B C K"],
    k: Float[Array, "*B C K"],
    decays: Decays,
    precision: jax.lax.Precision,
) -> Float[Array, "*B C C"]:
    """sum_c q_ic k_jc times what is left at i of token j in channel c, for j <= i."""
    if decays.since.shape[-1] == 1:
        return _scores(q, k, precision) * matrix(decays)
    blocks = jnp.sum(q * k, axis=-1)[..., None, None]
    for early, late in zip(decays.early, decays.late, strict=True):
        (k_early, _), (_, q_late) = (
            _split(k, early.shape[-2]),
            _split(q, late.shape[-2]),
        )
        blocks = _enclose(blocks, _scores(q_late * late, k_early * early, precision))
    return blocks[..., 0, :, :]


def sums(
    weights: Float[Array, "*B C C"],
    x: Float[Array, "*B C M"],
    decays: Decays,
    precision: jax.lax.Precision,
) -> Float[Array, "*B C M"]:
    """sum over j <= i of weights_ij x_jm times what is left at i of token j in m."""
    if decays.since.shape[-1] == 1:
        return jnp.matmul(weights * matrix(decays), x, precision=precision)
    out = jnp.diagonal(weights, axis1=-2, axis2=-1)[..., None] * x
    for early, late in zip(decays.early, decays.late, strict=True):
        half = early.shape[-2]
        x_early, _ = _split(x, half)
        corner = _corners(weights, half)
        read = late * jnp.matmul(corner, x_early * early, precision=precision)
        out += _join(jnp.zeros_like(read), read)
    return out


def _scores(q, k, precision):
    return jnp.einsum("...ik,...jk->...ij", q, k, precision=precision)


def _halves(size):
    """1, 2, 4 ... size / 2."""
    if size & (size - 1):
        raise ValueError(f"a chunk must hold a power of two tokens, got {size}")
    return [1 << level for level in range(size.bit_length() - 1)]


def _split(x, half):
    """The early and the late halves of blocks, [..., C, D] to 2 of [..., n, s, D]."""
    pairs = x.reshape(*x.shape[:-2], -1, 2, half, x.shape[-1])
    return pairs[..., 0, :, :], pairs[..., 1, :, :]


def _join(early, late):
    """Undoes `_split`."""
    pairs = jnp.stack([early, late], axis=-3)
    return pairs.reshape(*pairs.shape[:-4], -1, pairs.shape[-1])


def _enclose(blocks, corner):
    """Lower-triangular blocks in twos, each two made one by its lower left corner."""
    *lead, count, half, _ = blocks.shape
    pairs = blocks.reshape(*lead, count // 2, 2, half, half)
    top = jnp.concatenate([pairs[..., 0, :, :], jnp.zeros_like(corner)], axis=-1)
    low = jnp.concatenate([corner, pairs[..., 1, :, :]], axis=-1)
    return jnp.concatenate([top, low], axis=-2)


def _corners(weights, half):
    """The lower left corner of each block of two halves, [..., n, s, s]."""
    *lead, size, _ = weights.shape
    count = size // (2 * half)
    blocks = weights.reshape(*lead, count, 2, half, count, 2, half)
    corner = blocks[..., :, 1, :, :, 0, :]
    return jnp.moveaxis(jnp.diagonal(corner, axis1=-4, axis2=-2), -1, -3)
