"""Random numbers that depend on a seed, and on the step of a data stream.

Only raw bits of numpy's bit generators are used. numpy promises that those never
change, and a saved position of a data stream must mean the same for ever.
"""

from typing import Any

import numpy as np


def shuffled(seed: int, count: int) -> list[int]:
    """0 to count - 1 in an order that depends on a seed alone.

    Raises:
        ValueError: if seed is below 0.
    """
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    return np.random.PCG64(seed).random_raw(count).argsort(kind="stable").tolist()


class StepRandom:
    """Numbers that depend on a seed and a step alone."""

    def __init__(self, seed: int, step: int):
        # The last number keeps this stream apart from others of the seed.
        self._bits = np.random.PCG64(np.random.SeedSequence([seed, step, 5]))

    def share(self, shape: Any = ()) -> Any:
        """Numbers in [0, 1)."""
        size = int(np.prod(shape))
        raw = np.asarray(self._bits.random_raw(size)).reshape(shape)
        return (raw >> np.uint64(11)) / 2.0**53

    def below(self, limit: int, shape: Any = ()) -> Any:
        """Whole numbers in [0, limit)."""
        return np.floor(self.share(shape) * limit).astype(np.int64)

    def order(self, count: int) -> list[int]:
        """0 to count - 1 in a drawn order."""
        return self.share(count).argsort(kind="stable").tolist()
