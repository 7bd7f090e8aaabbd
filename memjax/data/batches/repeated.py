"""Repetition of the first batches of an iterator."""

from collections.abc import Mapping
from typing import Any

from memjax.checks import check_sizes
from memjax.data.batches.batch import Batch
from memjax.data.batches.pipeline import BatchIterator


class RepeatedBatches:
    """Repeats the first `count` batches endlessly; the position counts all of them."""

    def __init__(self, batches: BatchIterator, count: int):
        """Takes `count` batches, at least 1."""
        check_sizes(count=count)
        self._first = [next(batches) for _ in range(count)]
        self._batches = batches
        self._step = 0

    def __next__(self) -> Batch:
        batch = self._first[self._step % len(self._first)]
        self._step += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Returns the position, ready for JSON."""
        return self._batches.get_state() | {"step": self._step}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to a position that `get_state` gave.

        Raises:
            ValueError: as `BatchIterator.set_state`.
        """
        self._batches.set_state(state)
        self._step = state["step"]
