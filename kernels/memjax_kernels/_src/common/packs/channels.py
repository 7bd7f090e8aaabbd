"""Gates of channels of packed heads, and decays between tokens.

`common.decays` says why decays between tokens are products over the halves of blocks of
2, 4, 8 ... tokens: no two sums of gates are subtracted. A block is summed from its
halves, which rotations of the rows of a register bring together.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import packs

# Tokens of a block whose gates rotations sum: a register's rows.
BLOCK = 8
# Limit of sums of gates in a quarter of a chunk for which decays are quotients of those
# to the middle of a half: operands keep their digits in two parts of bfloat16.
MILD = 70.0


class Decays(NamedTuple):
    """Decays of a chunk.

    Attributes:
        blocks: of blocks of 1, 2, 4 ... C tokens: in a late half up to and with each
            token, in an early half from behind it to the half's end. Of a mild chunk
            those of `_mild`.
        since: from the chunk's start up to and with each token.
        until: from behind each token to the chunk's end.
    """

    blocks: list[Float[Array, "P _ DD"]]
    since: Float[Array, "P C DD"]
    until: Float[Array, "P C DD"]


def decays(g: Float[Array, "P C DD"], mild: bool = False) -> Decays:
    """The decays of log gates, none below `gate_sums.FORGETS_ALL`."""
    found, since, until = _sums(g)
    if mild:
        return _mild(found, since, until)
    blocks = [jnp.exp(x) for x in found]
    return Decays([jnp.ones_like(g), *blocks], jnp.exp(since), jnp.exp(until))


def _sums(g: Float[Array, "P C DD"]) -> tuple[list[Array], Array, Array]:
    """Sums of gates whose exponentials are `Decays`, from blocks of two tokens on."""
    size = g.shape[1]
    # All registers of a pack have the same rows of blocks.
    rows = packs.sublane((1, min(BLOCK, size), g.shape[2]))
    since = g.reshape(-1, *rows.shape[1:])
    found, until, half = [], jnp.zeros_like(since), 1
    while half < rows.shape[1]:
        late = (rows & half) > 0
        found.append(jnp.where(late, since, until).reshape(g.shape))
        # Sums of blocks twice as large, from those of both halves.
        total = since + until
        since += jnp.where(late, _rotate(total, half), 0.0)
        until += jnp.where(late, 0.0, _rotate(total, -half))
        half *= 2
    since, until = since.reshape(g.shape), until.reshape(g.shape)
    while half < size:
        ups, downs = (jnp.split(x, size // half, axis=1) for x in (since, until))
        found.append(_interleave(downs[::2], ups[1::2]))
        totals = [x[:, -1:] for x in ups]
        since = _interleave(
            ups[::2], [x + y for x, y in zip(ups[1::2], totals[::2], strict=True)]
        )
        until = _interleave(
            [x + y for x, y in zip(downs[::2], totals[1::2], strict=True)], downs[1::2]
        )
        half *= 2
    return found, since, until


def _mild(found: list[Array], since: Array, until: Array) -> Decays:
    """Decays of a chunk that forgets little.

    The blocks are decays from the middle of each token's half to the token, 1 / these
    before it; their inverses; and those of the early half to the late one's middle.
    """
    quarters = jnp.split(found[-2], 4, axis=1)
    middle = _interleave([-x for x in quarters[::2]], quarters[1::2])
    reads, writes = jnp.exp(middle), jnp.exp(-middle)

    def at(sums, quarter):
        end = quarter * (sums.shape[1] // 4)
        return jnp.exp(sums[:, end - 1 : end])

    (early, late), (before, behind) = (jnp.split(x, 2, axis=1) for x in (reads, writes))
    third = at(found[-1], 3)
    # From the chunk's middle, and to it.
    late, before = late * third, before * at(found[-1], 1)
    return Decays(
        [reads, writes, before * third],
        jnp.concatenate([early * at(since, 1), late * at(since, 2)], axis=1),
        jnp.concatenate([before * at(until, 2), behind * at(until, 3)], axis=1),
    )


def _rotate(blocks: Float[Array, "N R DD"], by: int) -> Float[Array, "N R DD"]:
    """Rows of each block, moved down and around."""
    return pltpu.roll(blocks, by % blocks.shape[1], axis=1)


def all_lanes(row: Float[Array, "P 1 KK"], heads: int, width: int) -> Array:
    """Numbers of channels, in all lanes of a memory [P, K, VV] with `width` lanes."""
    wide = jnp.broadcast_to(row, (row.shape[0], width, row.shape[-1]))
    return packs.diagonal_blocks(jnp.swapaxes(wide, 1, 2), heads)


def channel_sums(memory: Float[Array, "P K VV"], heads: int) -> Array:
    """Sums over each head's lanes of a memory, as a row of channels [P, 1, KK]."""
    by_head = jnp.split(jnp.swapaxes(memory, 1, 2), heads, axis=1)
    return jnp.concatenate([packs.sum_slots(x) for x in by_head], axis=-1)


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


def suffix_sums(x: Float[Array, "P C DD"]) -> Float[Array, "P C DD"]:
    """Sums over each token and those after it."""
    block, step = min(BLOCK, x.shape[1]), 1
    place = packs.sublane((1, block, x.shape[2]))
    within = x.reshape(-1, block, x.shape[2])
    while step < block:
        within += jnp.where(place < block - step, _rotate(within, -step), 0.0)
        step *= 2
    blocks = jnp.split(within.reshape(x.shape), x.shape[1] // block, axis=1)
    for i in reversed(range(len(blocks) - 1)):
        blocks[i] += blocks[i + 1][:, :1]
    return jnp.concatenate(blocks, axis=1)
