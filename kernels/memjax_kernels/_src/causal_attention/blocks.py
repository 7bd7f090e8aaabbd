"""The visible pairs of blocks of queries and keys, one per step of a kernel's grid.

A grid of all pairs would spend time on pairs that the causal mask hides. How far a
block of keys lies behind the queries decides what a step hides, and few distances hide
anything: a kernel has code for each of them, without the tiles that no query sees.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from memjax_kernels._src.common.packs import tuned
from memjax_kernels._src.common.packs.tiles import LANES


class Steps(NamedTuple):
    """Each step of a kernel.

    Attributes:
        query: number of the block of queries.
        key: number of the block of keys.
        kind: number of the distance between both, see `Plan`.
        last: 1 at the last step of what is added up, a block of queries or of keys.
        fresh: 1 where the block of queries comes for the first time.
    """

    query: Int32[np.ndarray, " N"]
    key: Int32[np.ndarray, " N"]
    kind: Int32[np.ndarray, " N"]
    last: Int32[np.ndarray, " N"]
    fresh: Int32[np.ndarray, " N"]


class Part(NamedTuple):
    """Keys of a block, and the queries that see some of them.

    Attributes:
        keys: rows of the block of keys.
        queries: rows of the block of queries.
        distance: position of the first query less that of the first key; None where
            every query sees every key.
    """

    keys: slice
    queries: slice
    distance: int | None


class Plan(NamedTuple):
    """The steps of a kernel.

    Attributes:
        block: tokens of a block.
        tile: tokens of a tile.
        window: keys that a query sees, its own among them; None is all before it.
        steps: of the grid.
        distances: of each kind of step, position of the first query less that of the
            first key; None where every query sees every key.
    """

    block: int
    tile: int
    window: int | None
    steps: Steps
    distances: tuple[int | None, ...]

    def parts(self, kind: int) -> Iterator[Part]:
        """What a step of this kind computes: each part's own queries and keys."""
        first, block, tile = self.distances[kind], self.block, self.tile
        if first is None:
            yield Part(slice(0, block), slice(0, block), None)
            return
        for row in range(0, block, tile):
            at = [c for c in range(0, block, tile) if self._sees(first + c - row)]
            if at:
                queries = slice(at[0], at[-1] + tile)
                yield Part(slice(row, row + tile), queries, first + at[0] - row)

    def hides(self, distance: int, size: int) -> bool:
        """Whether some of `size` queries do not see some of as many keys."""
        nearest, farthest = distance - (size - 1), distance + (size - 1)
        beyond = self.window is not None and farthest >= self.window
        return nearest < 0 or beyond

    def _sees(self, distance):
        """Whether some query of a tile sees some key."""
        nearest, farthest = distance - (self.tile - 1), distance + (self.tile - 1)
        return farthest >= 0 and (self.window is None or nearest < self.window)


def block_size(time: int, largest: int) -> int:
    """The largest size of blocks that divides `time`: whole registers of tokens."""
    return next(size for size in range(largest, 0, -LANES) if time % size == 0)


@functools.cache
def plan(time: int, window: int | None, by_key: bool) -> Plan:
    """The steps for T tokens, a multiple of 128.

    Args:
        time: T.
        window: keys that a query sees, its own among them; None is all before it.
        by_key: whether steps of one block of keys follow each other, else of queries,
            those of a block with itself first.
    """
    sizes = tuned.SIZES.causal_attention
    block = block_size(time, sizes.block)
    tile = block_size(block, sizes.tile)
    pairs = [
        (i, j)
        for i in range(time // block)
        for j in range(i + 1)
        # The first query is the one with the most distant keys to see.
        if window is None or (i - j) * block - (block - 1) < window
    ]
    pairs.sort(key=lambda p: p[::-1] if by_key else (p[0], p[0] != p[1], p[1]))
    empty = Plan(block, tile, window, Steps(*(np.zeros(0, np.int32),) * 5), ())
    kinds: dict[int | None, int] = {}

    def kind(pair):
        first = (pair[0] - pair[1]) * block
        return kinds.setdefault(
            first if empty.hides(first, block) else None, len(kinds)
        )

    numbers = np.array([kind(pair) for pair in pairs], np.int32)
    query, key = np.array(pairs, np.int32).T
    outer = key if by_key else query
    last = np.concatenate([outer[1:] != outer[:-1], [True]])
    fresh = np.zeros(len(pairs), bool)
    fresh[np.unique(query, return_index=True)[1]] = True
    flags = (flag.astype(np.int32) for flag in (last, fresh))
    steps = Steps(query, key, numbers, *flags)
    return empty._replace(steps=steps, distances=tuple(kinds))
