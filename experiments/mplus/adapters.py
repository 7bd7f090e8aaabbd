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
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from experiments.mplus import models
from memjax.config_io import to_record
from memjax.data import Tokenizer, load_tokens
from memjax.data.batches.batch import Batch
from memjax.data.mplus_tasks.task_batches import TaskBatches
from memjax.data.mplus_tasks.tasks import TaskBatch
from memjax.models import LanguageModel
from memjax.models.adapters import merge_lora
from memjax.models.lora import LoraConfig, add_lora
from memjax.training import LoopConfig, loop
from memjax.training.config import Outcome
from memjax.training.finetune.mplus_stage import MPlusStage
from memjax.training.optimizer import make_optimizer
from memjax.training.run_folder import (
    RunFolder,
    newest_state,
    read_config,
    record_config,
)
from memjax.training.step import (
    StepConfig,
    TrainState,
    init_train_state,
    make_train_step,
    model_of,
)


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
class Tuning:
    """The record of a training of adapters: highest learning rate, seed, updates."""

    learning_rate: float
    seed: int
    updates: int
    lora: LoraConfig = LoraConfig(rank=16, alpha=32.0)

    @property
    def stage(self) -> MPlusStage:
        """M+'s stage, whose tasks and schedule they are, with this rate and seed."""
        own = models.stage(3)
        optimizer = dataclasses.replace(own.optimizer, learning_rate=self.learning_rate)
        return dataclasses.replace(own, optimizer=optimizer, seed=self.seed)

    def transform(self) -> optax.GradientTransformation:
        """M+'s optimizer with the learning rate of this training."""
        return make_optimizer(self.stage.optimizer, self.updates)

    def wrap(self, backbone: LanguageModel) -> LanguageModel:
        """The backbone with new adapters, which change nothing yet."""
        return add_lora(backbone, self.lora, jax.random.key(self.seed))

    def first_state(self, model: LanguageModel) -> TrainState:
        """Of a wrapped model."""
        rows = self.stage.data.batch_size
        return init_train_state(model, self.transform(), StepConfig(), rows)


def train(
    tuning: Tuning, backbone: LanguageModel, tokenizer: Tokenizer, run_dir: Path
) -> Outcome:
    """Trains the adapters, or resumes; see `loop.train` for errors and result."""
    with RunFolder(run_dir) as folder:
        record_config(tuning, folder, ())
    model, stage = tuning.wrap(backbone), tuning.stage
    data = stage.data
    texts = load_tokens(data.source, tokenizer, "train", data.cache_dir)
    step = make_train_step(model, tuning.transform(), StepConfig())
    _, outcome = loop.train(
        jax.jit(step, donate_argnums=0),
        # A copy, because the update donates it, and the backbone is the caller's.
        jax.tree.map(lambda x: x.copy(), tuning.first_state(model)),
        TaskTexts(stage.batches(texts, tokenizer, backbone.vocab_size)),
        LoopConfig(steps=tuning.updates, save_every=stage.loop.save_every, keep=1),
        run_dir,
        config_record=to_record(tuning),
        tokens_per_step=data.batch_size * stage.tasks.target,
    )
    return outcome


def load(folder: Path, backbone: LanguageModel) -> LanguageModel:
    """The backbone with the trained adapters merged in."""
    tuning: Tuning = read_config(Tuning, folder)
    model = tuning.wrap(backbone)
    shapes = jax.eval_shape(lambda: tuning.first_state(model))
    state = newest_state(folder, shapes)
    return merge_lora(model_of(nnx.graphdef(model), state))


def recipe(folder: Path) -> list[dict[str, Any]]:
    """The training as JSON, as `models.recipe`."""
    tuning: Tuning = read_config(Tuning, folder)
    trained = "backbone", f"on the tasks of {models.PRESET}-stage3"
    return models.described(*trained, folder, tuning.stage, tuning.lora.rank)
