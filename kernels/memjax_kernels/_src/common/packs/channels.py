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
# Tokens of a block whose gates products sum: a register's rows.
BLOCK = 8


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
    i, t = (axis((size, size)) for axis in (packs.sublane, packs.lane))

    def summed(half):
        """Masks of a block's prefix sums, and of its exclusive suffix sums."""
        alike = (i ^ t) < half
        return alike & (t <= i), alike & (t > i)

    def chosen(half):
        late, (up_to, behind) = (i & half) > 0, summed(half)
        return (late & up_to) | (~late & behind)

    block = min(BLOCK, size)
    numbers = [mask.astype(F32) for mask in (chosen(2), chosen(4), *summed(block))]
    # The gates of all packs beside each other: one product.
    wide, ones = jnp.concatenate([*g], axis=-1), jnp.concatenate(numbers).astype(BF16)
    sums = packs.in_parts(lambda part: multiply(ones, part, "nn", BF16), wide, parts)
    by_pack = jnp.stack([sums[:, p * width : (p + 1) * width] for p in range(count)])
    *found, since, until = jnp.split(by_pack, len(numbers), axis=1)
    found.insert(0, jnp.where((packs.sublane(g.shape) & 1) > 0, g, 0.0))
    # Sums of larger blocks, from those of their halves.
    while block < size:
        ups, downs = (jnp.split(x, size // block, axis=1) for x in (since, until))
        found.append(_interleave(downs[::2], ups[1::2]))
        totals = [x[:, -1:] for x in ups]
        since = _interleave(
            ups[::2], [x + y for x, y in zip(ups[1::2], totals[::2], strict=True)]
        )
        until = _interleave(
            [x + y for x, y in zip(downs[::2], totals[1::2], strict=True)], downs[1::2]
        )
        block *= 2
    blocks = [jnp.exp(x) for x in found]
    return Decays([jnp.ones_like(g), *blocks], jnp.exp(since), jnp.exp(until))


def _interleave(early: list[Array], late: list[Array]) -> Array:
    """Early and late halves of blocks, in order."""
    both = zip(early, late, strict=True)
    return jnp.concatenate([x for pair in both for x in pair], axis=1)


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
