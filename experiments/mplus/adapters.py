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
from memjax.training.checkpoints.checkpoint import open_folder
from memjax.training.config import Outcome
from memjax.training.finetune import finetune
from memjax.training.finetune.mplus_stage import MPlusStage
from memjax.training.optimizer import make_optimizer
from memjax.training.run_folder import (
    CHECKPOINTS,
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
    """The record of a training of adapters.

    Attributes:
        preset: of `memjax finetune`; tasks and schedule are those of its third stage.
        learning_rate: the highest of the schedule.
        seed: of adapters and tasks.
        updates: how many.
        backbone: name of the model.
        backbone_digest: of its parameters.
        rank: of the adapters.
        alpha: their changes are scaled by alpha / rank.
    """

    preset: str
    learning_rate: float
    seed: int
    updates: int
    backbone: str
    backbone_digest: str
    rank: int = 16
    alpha: float = 32.0

    @property
    def stage(self) -> MPlusStage:
        """M+'s, with this seed."""
        return dataclasses.replace(models.stage(self.preset, 3), seed=self.seed)


def train(
    tuning: Tuning, backbone: LanguageModel, tokenizer: Tokenizer, run_dir: Path
) -> Outcome:
    """Trains the adapters, or resumes; see `loop.train` for errors and result."""
    with RunFolder(run_dir) as folder:
        record_config(tuning, folder, ())
    model, stage = _adapted(tuning, backbone), tuning.stage
    data = stage.data
    texts = load_tokens(data.source, tokenizer, "train", data.cache_dir)
    step = make_train_step(model, _transform(tuning), StepConfig())
    _, outcome = loop.train(
        jax.jit(step, donate_argnums=0),
        # A copy, because the update donates it, and the backbone is the caller's.
        jax.tree.map(lambda x: x.copy(), _first_state(model, tuning)),
        TaskTexts(stage.batches(texts, tokenizer, backbone.vocab_size)),
        LoopConfig(steps=tuning.updates, save_every=stage.loop.save_every, keep=1),
        run_dir,
        config_record=to_record(tuning),
        tokens_per_step=data.batch_size * stage.tasks.target,
    )
    return outcome


def load(folder: Path, backbone: LanguageModel) -> LanguageModel:
    """The backbone with the trained adapters merged in.

    Raises:
        ValueError: if the folder is no such training, is not finished, or is of another
            backbone.
    """
    tuning: Tuning = read_config(Tuning, folder)
    if finetune.digest(backbone) != tuning.backbone_digest:
        raise ValueError(
            f"tuned={str(folder)!r} must be of the same backbone, it is of another"
        )
    if (updates := _updates(folder)) < tuning.updates:
        raise ValueError(
            f"tuned={str(folder)!r} must have all {tuning.updates} updates, it has "
            f"{updates}: repeat the call that trains it"
        )
    model = _adapted(tuning, backbone)
    shapes = jax.eval_shape(lambda: _first_state(model, tuning))
    state = newest_state(folder, shapes)
    return merge_lora(model_of(nnx.graphdef(model), state))


def recipe(folder: Path) -> list[dict[str, Any]]:
    """The training as JSON, as `models.recipe`."""
    tuning: Tuning = read_config(Tuning, folder)
    stage, updates = tuning.stage, _updates(folder)
    return [
        {
            "trained": "backbone",
            "stage": f"on the tasks of {tuning.preset}",
            "updates": updates,
            "of_updates": tuning.updates,
            "texts_an_update": stage.data.batch_size,
            "target_tokens": updates * stage.data.batch_size * stage.tasks.target,
            "learning_rate": tuning.learning_rate,
            "lora_rank": tuning.rank,
            "lora_alpha": tuning.alpha,
            "tasks_ask": stage.tasks.ask,
            "source": stage.data.source,
            "seed": tuning.seed,
            "backbone": tuning.backbone,
        }
    ]


def _adapted(tuning: Tuning, backbone: LanguageModel) -> LanguageModel:
    """The backbone with new adapters, which change nothing yet."""
    lora = LoraConfig(rank=tuning.rank, alpha=tuning.alpha)
    return add_lora(backbone, lora, jax.random.key(tuning.seed))


def _transform(tuning: Tuning) -> optax.GradientTransformation:
    """M+'s optimizer with the learning rate of this training."""
    config = dataclasses.replace(
        tuning.stage.optimizer, learning_rate=tuning.learning_rate
    )
    return make_optimizer(config, tuning.updates)


def _first_state(model: LanguageModel, tuning: Tuning) -> TrainState:
    rows = tuning.stage.data.batch_size
    return init_train_state(model, _transform(tuning), StepConfig(), rows)


def _updates(folder: Path) -> int:
    return max(open_folder(folder / CHECKPOINTS).steps(), default=0)
