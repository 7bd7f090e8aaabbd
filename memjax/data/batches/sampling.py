"""Random numbers by a seed and the step of a data stream.

They are made from raw bits of numpy's bit generators, which numpy guarantees never to
change: a saved position of a data stream must stay valid.
"""

from typing import Any

import numpy as np

from memjax.checks import short


def shuffled(seed: int, count: int) -> list[int]:
    """A permutation of 0 to count - 1 that depends on the seed only.

    Raises:
        ValueError: if seed is below 0.
    """
    if not hasattr(seed, "__index__"):
        raise ValueError(f"seed must be an integer, got {short(seed)}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    return np.random.PCG64(seed).random_raw(count).argsort(kind="stable").tolist()


class StepRandom:
    """Random numbers that depend on a seed and a step only."""

    def __init__(self, seed: int, step: int):
        # The last number separates this stream from others of the seed.
        self._bits = np.random.PCG64(np.random.SeedSequence([seed, step, 5]))

    def uniform(self, shape: int | tuple[int, ...] = ()) -> Any:
        """Numbers in [0, 1)."""
        size = int(np.prod(shape))
        raw = np.asarray(self._bits.random_raw(size)).reshape(shape)
        return (raw >> np.uint64(11)) / 2.0**53

    def integers(self, limit: int, shape: int | tuple[int, ...] = ()) -> Any:
        """Whole numbers in [0, limit)."""
        return np.floor(self.uniform(shape) * limit).astype(np.int64)

    def permutation(self, count: int) -> list[int]:
        """A permutation of 0 to count - 1."""
        return self.uniform(count).argsort(kind="stable").tolist()
