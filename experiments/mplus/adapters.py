"""Trains adapters of a backbone without a memory on the lessons that M+ is trained on.

    python -m experiments.mplus.adapters --run-dir RUN --learning-rate 3e-4
    python -m experiments.mplus.retention.knowledge_retention --tuned RUN

As many updates, of the same texts in the same order (`lessons.py`), with LoRA of M+'s
rank. The lessons are shorter than every window that is tested and are read whole, so
one training serves full attention, windows, SnapKV, text that is read again and BM25.
Two learning rates are trained; the better one is chosen by the validation facts:

    python -m experiments.mplus.retention.knowledge_retention --tuned RUN \\
        --split validation --samples 24 --after 0 4 --methods "full attention"

A call that was stopped is repeated and goes on from its newest checkpoint.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import optax
import tyro
from flax import nnx

from experiments.lab import backbones
from experiments.mplus.tuned.lessons import Lessons
from memjax.checks import check_positive, check_seed, check_sizes, require_known
from memjax.config_io import to_record
from memjax.data import Tokenizer, load_tokens
from memjax.models import LanguageModel
from memjax.models.lora import LoraConfig, add_lora, merge_lora
from memjax.training import LoopConfig, loop
from memjax.training.checkpoints.checkpoint import open_folder
from memjax.training.config import Outcome
from memjax.training.finetune import finetune
from memjax.training.finetune.mplus_presets import presets
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


@dataclasses.dataclass(frozen=True)
class Config:
    """What is trained.

    Attributes:
        run_dir: folder of the training.
        preset: of `memjax finetune`, whose lessons and updates are taken.
        backbone: "smollm2", or what `memjax finetune` takes as a backbone.
        learning_rate: the highest; the rest of the schedule is the preset's.
        rank: of the adapters.
        alpha: their changes are scaled by alpha / rank.
        updates: how many; 0 is as many as the preset's.
        seed: of the adapters and of the lessons.
        save_every: updates between checkpoints.
    """

    run_dir: Path
    preset: str = "mplus-smollm2-135m-stage3"
    backbone: str = "smollm2"
    learning_rate: float = 3e-4
    rank: int = 16
    alpha: float = 32.0
    updates: int = 0
    seed: int = 42
    save_every: int = 40

    def __post_init__(self):
        require_known("preset", self.preset, tuple(presets()))
        check_positive(learning_rate=self.learning_rate, alpha=self.alpha)
        check_sizes(rank=self.rank, save_every=self.save_every)
        if self.updates < 0:
            raise ValueError(f"updates must be at least 0, got {self.updates}")
        check_seed(self.seed)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What the folder says about a training: settings, and what it was made from."""

    preset: str
    learning_rate: float
    rank: int
    alpha: float
    seed: int
    updates: int
    backbone: str
    backbone_digest: str

    @property
    def stages(self) -> list[MPlusStage]:
        """M+'s, with this seed."""
        found = [stage for _, stage in presets()[self.preset].stages()]
        return [dataclasses.replace(stage, seed=self.seed) for stage in found]


def main(config: Config) -> None:
    """Trains, or resumes the training in the folder."""
    path = backbones.located(config.backbone)
    backbone = finetune.load_backbone(path)
    stages = [stage for _, stage in presets()[config.preset].stages()]
    tuning = Tuning(
        preset=config.preset,
        learning_rate=config.learning_rate,
        rank=config.rank,
        alpha=config.alpha,
        seed=config.seed,
        updates=config.updates or sum(stage.loop.steps for stage in stages),
        backbone=Path(backbone.origin).name,
        backbone_digest=backbone.digest,
    )
    outcome = train(
        tuning, backbone.model, backbone.tokenizer, config.run_dir, config.save_every
    )
    raise SystemExit(outcome.exit_code)


def train(
    tuning: Tuning,
    backbone: LanguageModel,
    tokenizer: Tokenizer,
    run_dir: Path,
    save_every: int,
) -> Outcome:
    """Trains the adapters; see `loop.train` for what is raised and returned."""
    with RunFolder(run_dir) as folder:
        record_config(tuning, folder, ())
    model, last = _adapted(tuning, backbone), tuning.stages[-1]
    step = make_train_step(model, _transform(tuning), StepConfig())
    stop = LoopConfig(steps=tuning.updates, save_every=save_every, keep=1)
    _, outcome = loop.train(
        jax.jit(step, donate_argnums=0),
        # A copy, because the update donates it, and the backbone is the caller's.
        jax.tree.map(lambda x: x.copy(), _first_state(model, tuning)),
        lessons(tuning, tokenizer, backbone.vocab_size),
        stop,
        run_dir,
        config_record=to_record(tuning),
        tokens_per_step=last.data.batch_size * last.tasks.target,
    )
    return outcome


def lessons(tuning: Tuning, tokenizer: Tokenizer, vocab_size: int) -> Lessons:
    """The lessons of all stages, from the first on."""

    def stream(stage):
        data = stage.data
        texts = load_tokens(data.source, tokenizer, "train", data.cache_dir)
        return stage.batches(texts, tokenizer, vocab_size)

    return Lessons([(stream(stage), stage.loop.steps) for stage in tuning.stages])


def load(folder: Path, backbone: LanguageModel) -> tuple[LanguageModel, int]:
    """The backbone with the trained adapters merged in, and the training's seed.

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
    return merge_lora(model_of(nnx.graphdef(model), state)), tuning.seed


def recipe(folder: Path) -> list[dict[str, Any]]:
    """As `experiments.mplus.recipe.recipe`."""
    tuning: Tuning = read_config(Tuning, folder)
    stages, updates = tuning.stages, _updates(folder)
    last = stages[-1]
    return [
        {
            "trained": "backbone",
            "stage": f"on the lessons of {tuning.preset}",
            "updates": updates,
            "of_updates": tuning.updates,
            "texts_an_update": last.data.batch_size,
            "target_tokens": updates * last.data.batch_size * last.tasks.target,
            "learning_rate": tuning.learning_rate,
            "lora_rank": tuning.rank,
            "lora_alpha": tuning.alpha,
            "tasks_ask": last.tasks.ask,
            "source": last.data.source,
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
    last = tuning.stages[-1].optimizer
    config = dataclasses.replace(last, learning_rate=tuning.learning_rate)
    return make_optimizer(config, tuning.updates)


def _first_state(model: LanguageModel, tuning: Tuning) -> TrainState:
    rows = tuning.stages[-1].data.batch_size
    return init_train_state(model, _transform(tuning), StepConfig(), rows)


def _updates(folder: Path) -> int:
    return max(open_folder(folder / CHECKPOINTS).steps(), default=0)


if __name__ == "__main__":
    main(tyro.cli(Config))
