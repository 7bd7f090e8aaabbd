"""LoRA adapters of a backbone without memory, trained on the training tasks of M+.

A task of M+ writes chunks and then scores a target that follows them, or asks for facts
that they state. Here chunks and target are one text of which the same target is scored,
for as many updates, on the same texts in the same order. The texts are shorter than
every window that is tested, so one training serves full attention, windows, SnapKV,
re-read text and BM25. A task that revisits an earlier target reads that target's own
chunks before it again: a KV cache has nothing to recall.

Shapes: B batch elements, n chunks, C longest chunk, T tokens of a target.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from experiments.mplus import models
from memjax.data import TokenisedDocument, Tokenizer
from memjax.data.batches.batch import Batch
from memjax.data.mplus_tasks.task_batches import TaskBatches
from memjax.data.mplus_tasks.tasks import TaskBatch
from memjax.models import LanguageModel
from memjax.models.adapters import merge_lora
from memjax.models.lora import LoraConfig
from memjax.training import LoopConfig
from memjax.training.finetune import finetune
from memjax.training.finetune.segment_stage import SegmentStage
from memjax.training.step import StepConfig


class TaskTexts:
    """A stream of `Batch`es: the tasks of M+ as plain texts, in their order."""

    def __init__(self, tasks: TaskBatches):
        self._tasks = tasks
        #: The text of the target that may be revisited.
        self._earlier: Batch | None = None

    def __iter__(self) -> "TaskTexts":
        return self

    def __next__(self) -> Batch:
        task, drawn = next(self._tasks)
        if task == "revisit":
            # A target is stored before it can be revisited.
            assert self._earlier is not None
            return self._earlier
        batch = as_text(drawn)
        if np.any(drawn.keep):
            self._earlier = batch
        return batch

    def get_state(self) -> dict[str, Any]:
        """The position as JSON, with the text that may be revisited as lists."""
        earlier = self._earlier and [np.asarray(x).tolist() for x in self._earlier]
        return {"tasks": self._tasks.get_state(), "earlier": earlier}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to a position of `get_state`."""
        self._tasks.set_state(state["tasks"])
        types = (np.int32, np.int32, np.float32, bool)
        earlier = state["earlier"]
        self._earlier = earlier and Batch(*map(np.asarray, earlier, types))


def as_text(task: TaskBatch) -> Batch:
    """Chunks and target [B, n C + T] in one, padded behind the target."""
    rows, count, chunk = task.chunks.shape
    target = task.target.tokens.shape[1]
    tokens, targets = np.zeros((2, rows, count * chunk + target), np.int32)
    mask = np.zeros(tokens.shape, np.float32)
    for row in range(rows):
        parts = zip(task.chunks[row], task.lengths[row], strict=True)
        before = np.concatenate(
            [np.zeros(0, np.int32), *(part[:length] for part, length in parts)]
        )
        begin, end = len(before), len(before) + target
        tokens[row, :begin] = before
        tokens[row, begin:end] = task.target.tokens[row]
        targets[row, : end - 1] = tokens[row, 1:end]
        targets[row, begin:end] = task.target.targets[row]
        mask[row, begin:end] = task.target.mask[row]
    return Batch(tokens, targets, mask, np.ones(rows, bool))


@dataclasses.dataclass(frozen=True)
class TaskStage(SegmentStage):
    """A backbone as it is, by adapters on M+'s tasks; its record is its parent's."""

    @property
    def tokens_read(self) -> int:
        """Tokens of a target."""
        return models.stage(3).tokens_read

    @property
    def shortest_document(self) -> int:
        """Tokens of the shortest document that a task reads."""
        return models.stage(3).shortest_document

    def batches(
        self,
        documents: list[TokenisedDocument],
        tokenizer: Tokenizer,
        vocab_size: int,
        **part: int,
    ) -> TaskTexts:
        """The tasks of M+'s last stage with this seed, as texts."""
        own = dataclasses.replace(models.stage(3), seed=self.seed)
        return TaskTexts(own.batches(documents, tokenizer, vocab_size, **part))


def stage(learning_rate: float, seed: int, updates: int) -> TaskStage:
    """Adapters of M+'s rank, with its schedule."""
    own = models.stage(3)
    return TaskStage(
        memory="none",
        train="lora",
        lora=LoraConfig(rank=own.memory.rank, alpha=own.memory.alpha),
        data=own.data,
        optimizer=dataclasses.replace(own.optimizer, learning_rate=learning_rate),
        step=StepConfig(),
        loop=LoopConfig(steps=updates, save_every=own.loop.save_every, keep=1),
        seed=seed,
    )


def load(folder: Path) -> LanguageModel:
    """The backbone with the trained adapters merged in."""
    return cast(LanguageModel, merge_lora(finetune.load(folder)[1]))
