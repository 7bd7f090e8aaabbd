"""M+'s lessons as plain texts, to train a backbone without a memory on them.

A lesson of M+ writes chunks and then scores a target that follows them, or asks for
facts that they state. Here chunks and target are one text, of which the same target is
scored: full attention, a window no shorter than a lesson, and all that puts text in
front of a question are trained alike by it. A lesson that revisits an earlier target
reads that target's own chunks before it again: a cache of keys has nothing to recall.

Shapes: B batch elements, n chunks, C longest chunk, T tokens of a target.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from memjax.data.batches.batch import Batch
from memjax.data.mplus_tasks.task_batches import TaskBatches
from memjax.data.mplus_tasks.tasks import TaskBatch


class Lessons:
    """A stream of `Batch`es: M+'s tasks of one stage after the other, in their order.

    Args:
        stages: of M+'s training, each with a stream at its beginning and the number of
            its updates; the last one goes on without end.
    """

    def __init__(self, stages: Sequence[tuple[TaskBatches, int]]):
        self._streams = [tasks for tasks, _ in stages]
        self._ends = np.cumsum([updates for _, updates in stages])[:-1]
        self._step = 0
        self._kept: Batch | None = None

    def __iter__(self) -> "Lessons":
        return self

    def __next__(self) -> Batch:
        stage = int(np.searchsorted(self._ends, self._step, side="right"))
        if self._step in self._ends:
            # A stage begins with an empty memory, and nothing to revisit.
            self._kept = None
        self._step += 1
        task, drawn = next(self._streams[stage])
        if task == "revisit":
            # There is one: a target is kept before it can be revisited.
            assert self._kept is not None
            return self._kept
        batch = as_text(drawn)
        if np.any(drawn.keep):
            self._kept = batch
        return batch

    def get_state(self) -> dict[str, Any]:
        """Returns the position, ready for JSON, with the lesson that may be revisited.

        It lies there as lists: it is one lesson.
        """
        kept = self._kept
        return {
            "step": self._step,
            "streams": [tasks.get_state() for tasks in self._streams],
            "kept": kept and [np.asarray(part).tolist() for part in kept],
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to a position that `get_state` gave.

        Raises:
            ValueError: the state is of other stages.
        """
        if len(state["streams"]) != len(self._streams):
            raise ValueError(
                f"state['streams'] must be of {len(self._streams)} stages, got "
                f"{len(state['streams'])}"
            )
        for tasks, position in zip(self._streams, state["streams"], strict=True):
            tasks.set_state(position)
        self._step, kept = state["step"], state["kept"]
        types = (np.int32, np.int32, np.float32, bool)
        self._kept = kept and Batch(*map(np.asarray, kept, types))


def as_text(lesson: TaskBatch) -> Batch:
    """Chunks and target [B, n C + T] in one, padded behind the target."""
    rows, count, chunk = lesson.chunks.shape
    target = lesson.target.tokens.shape[1]
    tokens, targets = np.zeros((2, rows, count * chunk + target), np.int32)
    mask = np.zeros(tokens.shape, np.float32)
    for row in range(rows):
        parts = zip(lesson.chunks[row], lesson.lengths[row], strict=True)
        told = np.concatenate(
            [np.zeros(0, np.int32), *(part[:length] for part, length in parts)]
        )
        begin, end = len(told), len(told) + target
        tokens[row, :begin] = told
        tokens[row, begin:end] = lesson.target.tokens[row]
        targets[row, : end - 1] = tokens[row, 1:end]
        targets[row, begin:end] = lesson.target.targets[row]
        mask[row, begin:end] = lesson.target.mask[row]
    return Batch(tokens, targets, mask, np.ones(rows, bool))
