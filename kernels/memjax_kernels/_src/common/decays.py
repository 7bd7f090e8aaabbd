"""Decay factors between the tokens of a chunk.

The decay from token j to token i is exp of the sum of gates j+1 to i. With one gate for
all channels the decays form a matrix. With a gate for each channel they are products
over the halves of blocks of 2, 4, 8 ... tokens: i and j lie in the late and the early
half of exactly one block, so that their decay is a product over the late half's tokens
up to i times one over the early half's tokens after j. Nothing is divided and no two
sums are subtracted. So a gate of -1e4 or -inf costs the tokens after it no digits, and
every gradient is finite.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import chunks
from memjax_kernels._src.common.products import Multiply


class Decays(NamedTuple):
    """Decays in a chunk of C tokens, for D channels.

    Attributes:
        since: from the chunk's start up to and with each token, [..., C, D].
        until: from each token to the chunk's end, [..., C, D].
        matrix: from token j to token i, [..., C, C], where D is 1.
        early: where D is not 1, for blocks of 2, 4 ... C tokens, from each token of a
            block's early half to that half's end, [..., C/2s, s, D].
        late: likewise, from the start of a late half up to and with each token.
    """

    since: Float[Array, "..."]
    until: Float[Array, "..."]
    matrix: Float[Array, "..."] | None
    early: list[Float[Array, "..."]]
    late: list[Float[Array, "..."]]


def decays(
    g: Float[Array, "*n B H C D"] | None, reset: Bool[Array, "*n B C"] | None, size: int
) -> Decays:
    """The decays of log gates. No gates are no decay, and a reset is a gate of -inf.

    Args:
        g: in [-inf, 0]; C is a power of two unless D is 1.
        reset: True forgets all that was before a token.
        size: C.
    """
    if g is None:
        lead = (1,) * (3 if reset is None else reset.ndim)
        g = jnp.zeros((*lead, size, 1), jnp.float32)
    g = g.astype(jnp.float32)
    if reset is not None:
        # exp(-inf) = 0 forgets all: a reset needs no code of its own from here on.
        g = jnp.where(reset[..., None, :, None], -jnp.inf, g)
    return _scalar(g) if g.shape[-1] == 1 else _vector(g)


def scores(
    queries: tuple[Float[Array, "*B C K"], ...],
    k: Float[Array, "*B C K"],
    left: Decays,
    multiply: Multiply,
) -> list[Float[Array, "*B C C"]]:
    """For each q: sum_c q_ic k_jc times the decay from j to i in channel c, j <= i.

    One product for all queries compiles faster.
    """
    if left.matrix is not None:
        return [multiply(q, k, "nt") * left.matrix for q in queries]
    found = [jnp.sum(q * k, axis=-1)[..., None, None] for q in queries]
    for early, late in zip(left.early, left.late, strict=True):
        k_early, _ = _split(k, early.shape[-2])
        rows = [_split(q, late.shape[-2])[1] * late for q in queries]
        corners = multiply(jnp.concatenate(rows, axis=-2), k_early * early, "nt")
        corners = jnp.split(corners, len(queries), axis=-2)
        found = [_enclose(*each) for each in zip(found, corners, strict=True)]
    return [blocks[..., 0, :, :] for blocks in found]


def sums(
    weights: Float[Array, "*B C C"],
    x: Float[Array, "*B C M"],
    left: Decays,
    multiply: Multiply,
) -> Float[Array, "*B C M"]:
    """sum over j <= i of weights_ij x_jm times the decay from j to i in channel m."""
    if left.matrix is not None:
        return multiply(weights * left.matrix, x, "nn")
    blocks, out = weights[..., None, :, :], jnp.zeros_like(x)
    for early, late in zip(left.early[::-1], left.late[::-1], strict=True):
        blocks, corner = _open(blocks)
        x_early, _ = _split(x, early.shape[-2])
        read = late * multiply(corner, x_early * early, "nn")
        out += _join(jnp.zeros_like(read), read)
    # Last are blocks of one token, which read their own write undecayed.
    return out + blocks[..., 0] * x


def _scalar(g):
    """One gate for all channels, [..., C, 1]."""
    # With one gate for all channels a matrix of decays is cheap enough to form.
    matrix = chunks.decay(g[..., 0])
    since = jnp.exp(jnp.cumsum(g, axis=-2))
    return Decays(since, matrix[..., -1, :, None], matrix, early=[], late=[])


def _vector(g):
    """A gate for each channel: products over blocks, from those over their halves."""
    # Blocks of one token: its own gate acts before its write, and nothing after it.
    since, until = jnp.exp(g), jnp.ones_like(g)
    early, late = [], []
    for half in _halves(g.shape[-2]):
        since_a, since_b = _split(since, half)
        until_a, until_b = _split(until, half)
        early.append(until_a)
        late.append(since_b)
        # Products of factors in [0, 1], so that nothing overflows and nothing is
        # divided.
        since = _join(since_a, since_a[..., -1:, :] * since_b)
        until = _join(until_a * since_b[..., -1:, :], until_b)
    return Decays(since, until, None, early, late)


def _halves(size):
    """1, 2, 4 ... size / 2."""
    # Blocks are halved down to single tokens.
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


def _open(blocks):
    """Undoes `_enclose`: the blocks on the diagonals, and the lower left corners."""
    *lead, count, size, _ = blocks.shape
    halves = blocks.reshape(*lead, count, 2, size // 2, 2, size // 2)
    first, second = halves[..., 0, :, 0, :], halves[..., 1, :, 1, :]
    pairs = jnp.stack([first, second], axis=-3)
    return pairs.reshape(*lead, 2 * count, *pairs.shape[-2:]), halves[..., 1, :, 0, :]
