"""Trains the rows of the comparison: first a learning rate is chosen for each.

Of each rate a short run is made with seed 0 and scored on validation documents; all
seeds take the better one. Every run is kept in a folder and goes on where it was
stopped, and so do the times that were spent.
"""

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.lab.measure import ScoreConfig, binned_losses, perplexity
from experiments.memories.equal_bytes_rows import ROWS
from experiments.memories.equal_bytes_tunings import Sizes, Stages, Tuning
from memjax import evaluation
from memjax.checks import check_sizes
from memjax.data import TokenisedDocument
from memjax.models import LanguageModel
from memjax.models.adapters import merge_lora
from memjax.training import Outcome
from memjax.training.checkpoints.checksums import write_atomically
from memjax.training.finetune import finetune
from memjax.training.finetune.retrofit_stage import RetrofitStage
from memjax.training.finetune.stage import Model

SPENT = "cpu_seconds.json"


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long, and at which rates.

    Attributes:
        updates: of one text each.
        rate_updates: of the short runs that a learning rate is chosen by.
        rates: to choose from.
    """

    updates: int = 160
    rate_updates: int = 24
    rates: tuple[float, ...] = (3e-4, 1e-3)

    def __post_init__(self):
        check_sizes(updates=self.updates, rate_updates=self.rate_updates)
        if not self.rates or not all(0 < rate < math.inf for rate in self.rates):
            raise ValueError(f"rates must be positive, got {self.rates}")

    @property
    def trials(self) -> int:
        """Updates of all short runs; a single rate needs none."""
        return len(self.rates) * self.rate_updates if len(self.rates) > 1 else 0


class Setting(NamedTuple):
    """What all rows are trained from.

    Attributes:
        backbone: the pretrained model.
        path: of it, as `memjax finetune` takes it.
        sizes: of all rows.
        source: of the training documents.
        validation: documents that a learning rate is chosen on.
        scores: how they are read.
        run_dir: folder of the runs.
    """

    backbone: LanguageModel
    path: Path | str
    sizes: Sizes
    source: str
    validation: Sequence[TokenisedDocument]
    scores: ScoreConfig
    run_dir: Path


class Took(NamedTuple):
    """What a run took.

    Attributes:
        cpu_seconds: of all stages.
        skipped_updates: of the last stage, for gradients that were not finite.
    """

    cpu_seconds: float
    skipped_updates: int


def train_row(
    name: str, seed: int, config: TrainConfig, setting: Setting, rate_file: Path
) -> tuple[Model, dict[str, Any]]:
    """A row's model as it is scored, and what its training was and cost.

    Args:
        name: of the row, which is trained.
        seed: of the run.
        config: how long.
        setting: what from.
        rate_file: where the chosen rate is written, or was.
    """
    chosen = choose_rate(name, config, setting, rate_file)
    folder = setting.run_dir / f"{name}-seed{seed}"
    tuning = Tuning(setting.source, config.updates, chosen["rate"], seed)
    stages = _stages(name, tuning, setting)
    model, took = _train(name, stages, setting, folder)
    return model, {
        "updates": config.updates,
        "skipped_updates": took.skipped_updates,
        "tokens": config.updates * setting.sizes.context,
        "cpu_seconds": took.cpu_seconds,
        "rate": chosen["rate"],
        "trials": chosen,
    }


def choose_rate(
    name: str, config: TrainConfig, setting: Setting, rate_file: Path
) -> dict[str, Any]:
    """The rate whose short run has the lowest loss on validation documents."""
    if len(config.rates) == 1:
        return {"rate": config.rates[0]}
    asked = {"rates": list(config.rates), "rate_updates": config.rate_updates}
    if rate_file.is_file():
        found = json.loads(rate_file.read_text())
        if all(found[key] == value for key, value in asked.items()):
            return found
    losses = []
    for rate in config.rates:
        model = _trial(name, rate, config, setting)
        losses.append(validation_loss(model, setting))
        print(f"{name}, rate {rate:g}: {losses[-1]:.4f} nats in validation", flush=True)
    best = min(range(len(losses)), key=lambda i: (math.isnan(losses[i]), losses[i]))
    found = asked | {"validation_nats": losses, "rate": config.rates[best]}
    rate_file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(rate_file, json.dumps(found, indent=1) + "\n")
    for rate in config.rates:
        # Each holds the whole backbone.
        shutil.rmtree(_trial_dir(name, rate, setting), ignore_errors=True)
    return found


def validation_loss(model: Model, setting: Setting) -> float:
    """Mean loss of the validation documents from the first target that counts on."""
    found = perplexity(model, setting.validation, setting.scores)
    losses = binned_losses(found["documents"], setting.scores.bins)
    return math.log(evaluation.perplexity(losses))


def _trial(name: str, rate: float, config: TrainConfig, setting: Setting) -> Model:
    """The model of a short run of one rate.

    That of a memory tunes what the run of seed 0 has aligned, which no rate changes.
    """
    whole = Tuning(setting.source, config.updates, rate, seed=0)
    short = dataclasses.replace(whole, updates=config.rate_updates)
    first, *others = _stages(name, whole, setting)
    stages, start = _stages(name, short, setting), None
    if isinstance(first[1], RetrofitStage) and first[1].part == "distill":
        aligned = setting.run_dir / f"{name}-seed0"
        _run((first,), setting, aligned)
        ((folder, tune),) = others
        tune = dataclasses.replace(tune, loop=short.loop(short.updates))
        stages, start = ((folder, tune),), aligned / first[0]
    return _train(name, stages, setting, _trial_dir(name, rate, setting), start)[0]


def _trial_dir(name: str, rate: float, setting: Setting) -> Path:
    return setting.run_dir / f"{name}-rate{rate:g}"


def _stages(name: str, tuning: Tuning, setting: Setting) -> Stages:
    stages = ROWS[name].stages
    assert stages is not None
    return stages(setting.backbone, setting.sizes, tuning)


def _train(
    name: str,
    stages: Stages,
    setting: Setting,
    folder: Path,
    start: Path | None = None,
) -> tuple[Model, Took]:
    """The scored model of a run."""
    took = _run(stages, setting, folder, start)
    _, model = finetune.load(folder / stages[-1][0])
    scored = ROWS[name].scored
    return scored(merge_lora(model), setting.backbone, setting.sizes), took


def _run(
    stages: Stages, setting: Setting, folder: Path, start: Path | None = None
) -> Took:
    """Trains what is missing of the stages."""
    train = lambda: finetune.finetune_stages(stages, setting.path, folder, start)
    return _timed(folder / SPENT, train)


def _timed(file: Path, train: Callable[[], Outcome]) -> Took:
    """Trains, and adds the seconds of processes before, which were stopped."""
    before = json.loads(file.read_text()) if file.is_file() else 0.0
    began = time.process_time()
    outcome = train()
    seconds = before + time.process_time() - began
    write_atomically(file, json.dumps(seconds))
    if outcome.reason != "finished":
        raise SystemExit(outcome.exit_code)
    return Took(seconds, outcome.skipped_steps)
