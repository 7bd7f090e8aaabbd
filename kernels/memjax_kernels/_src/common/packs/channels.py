"""Gates of channels of packed heads, and decays between tokens.

`common.decays` says why decays between tokens are products over the halves of blocks of
2, 4, 8 ... tokens: no two sums of gates are subtracted. Here the sums of all blocks are
one product of the gates with zeros and ones.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import packs
from memjax_kernels._src.common.products import multiply

F32 = jnp.float32
BF16 = jnp.dtype(jnp.bfloat16)


class Decays(NamedTuple):
    """Decays of a chunk.

    Attributes:
        blocks: of blocks of 1, 2, 4 ... C tokens: in a late half up to and with each
            token, in an early half from behind it to the half's end.
        since: from the chunk's start up to and with each token.
        until: from behind each token to the chunk's end.
    """

    blocks: list[Float[Array, "P C DD"]]
    since: Float[Array, "P C DD"]
    until: Float[Array, "P C DD"]


def decays(g: Float[Array, "P C DD"], parts: int) -> Decays:
    """The decays of log gates, none below `gate_sums.FORGETS_ALL`.

    Args:
        g: the gates.
        parts: in which they are summed (`packs.in_parts`).
    """
    count, size, width = g.shape
    halves = [1 << level for level in range(size.bit_length() - 1)]
    i, t = (axis((size, size)) for axis in (packs.sublane, packs.lane))

    def late(half):
        return (i & half) > 0

    chosen = [
        ((i ^ t) < half) & (((t <= i) & late(half)) | ((t > i) & ~late(half)))
        for half in halves
    ]
    numbers = [mask.astype(F32) for mask in (*chosen, t <= i, t > i)]
    chosen = jnp.concatenate(numbers).astype(BF16)
    # The gates of all packs beside each other: one product.
    wide = jnp.concatenate([*g], axis=-1)
    sums = packs.in_parts(lambda part: multiply(chosen, part, "nn", BF16), wide, parts)
    by_pack = jnp.stack([sums[:, p * width : (p + 1) * width] for p in range(count)])
    *blocks, since, until = jnp.split(jnp.exp(by_pack), len(halves) + 2, axis=1)
    return Decays([jnp.ones_like(g), *blocks], since, until)


def pairs(scores: Float[Array, "P C CC"]) -> list[Bool[Array, "P C CC"]]:
    """Tokens of reads (sublanes) and of writes, by their smallest block: 1, 2, 4 ... C.

    A block of one token has the pair of it with itself.
    """
    size = scores.shape[1]
    i, j = packs.sublane(scores.shape), packs.within(scores.shape, size)
    apart, later = i ^ j, i > j
    halves = [1 << level for level in range(size.bit_length() - 1)]
    of = [later & (apart >= half) & (apart < 2 * half) for half in halves]
    return [apart == 0, *of]


def suffix_sums(x: Float[Array, "P C DD"], parts: int) -> Float[Array, "P C DD"]:
    """Sums over each token and those after it."""
    shape = (x.shape[0], x.shape[1], x.shape[1])
    after = (packs.lane(shape) >= packs.sublane(shape)).astype(BF16)
    return packs.in_parts(lambda part: multiply(after, part, "nn", BF16), x, parts)
