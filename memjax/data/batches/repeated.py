"""The first batches of an iterator, over and over."""

from collections.abc import Mapping
from typing import Any

from memjax.checks import check_sizes
from memjax.data.batches.batch import Batch
from memjax.data.batches.pipeline import BatchIterator


class RepeatedBatches:
    """The first `count` batches in their order, and then the same again, for ever.

    The position is that of the iterator; what is drawn again counts on.
    """

    def __init__(self, batches: BatchIterator, count: int):
        """Draws `count` batches, at least 1."""
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
