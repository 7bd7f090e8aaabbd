"""The visible pairs of blocks of queries and keys, one per step of a kernel's grid.

A grid of all pairs would spend time on pairs that the causal mask hides.
"""

import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from memjax_kernels._src.common.packs.tiles import LANES

#: The largest blocks; counted for a v5e, with 256 and with 1,024 tokens a kernel takes
#: longer.
LARGEST = 512


class Steps(NamedTuple):
    """Each step of a kernel.

    Attributes:
        query: number of the block of queries.
        key: number of the block of keys.
        mask: number of the mask, see `Plan`.
        first: 1 at the first step of what is added up, a block of queries or of keys.
        last: 1 at its last step.
        fresh: 1 where the block of queries comes for the first time.
    """

    query: Int32[np.ndarray, " N"]
    key: Int32[np.ndarray, " N"]
    mask: Int32[np.ndarray, " N"]
    first: Int32[np.ndarray, " N"]
    last: Int32[np.ndarray, " N"]
    fresh: Int32[np.ndarray, " N"]


class Plan(NamedTuple):
    """The steps of a kernel.

    Of each mask `distances` has the position of the first query less that of the first
    key; None where every query sees every key.
    """

    block: int
    steps: Steps
    distances: tuple[int | None, ...]


def block_size(time: int, largest: int) -> int:
    """The largest size of blocks that divides `time`: whole registers of tokens."""
    return next(size for size in range(largest, 0, -LANES) if time % size == 0)


@functools.cache
def plan(time: int, window: int | None, by_key: bool) -> Plan:
    """The steps for T tokens, a multiple of 128.

    Args:
        time: T.
        window: keys that a query sees, its own among them; None is all before it.
        by_key: whether steps of one block of keys follow each other, else of queries.
    """
    block = block_size(time, LARGEST)
    pairs = [
        (i, j)
        for i in range(time // block)
        for j in range(i + 1)
        # The first query is the one with the most distant keys to see.
        if window is None or (i - j) * block - (block - 1) < window
    ]
    pairs.sort(key=lambda pair: pair[::-1] if by_key else pair)
    masks: dict[int | None, int] = {None: 0}
    numbers = [
        masks.setdefault(_distance((i - j) * block, block, window), len(masks))
        for i, j in pairs
    ]
    query, key = np.array(pairs, np.int32).T
    outer = key if by_key else query
    changes = np.concatenate([[True], outer[1:] != outer[:-1], [True]])
    fresh = np.zeros(len(pairs), bool)
    fresh[np.unique(query, return_index=True)[1]] = True
    flags = (changes[:-1], changes[1:], fresh)
    numbered = np.array(numbers, np.int32)
    steps = Steps(query, key, numbered, *(flag.astype(np.int32) for flag in flags))
    return Plan(block, steps, tuple(masks))


def _distance(first, block, window):
    """`first`, or None where nothing is hidden."""
    nearest, farthest = first - (block - 1), first + (block - 1)
    hidden = nearest < 0 or (window is not None and farthest >= window)
    return first if hidden else None
