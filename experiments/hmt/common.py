"""What the HMT experiments share: backbones, fine-tuned models, result files.

A backbone is a pretrained model, or a small one that is trained here on the documents
of the experiment in a minute or two. Every fine-tuned model is kept in a folder whose
name is a digest of its settings. So experiments share models, and a program that was
stopped continues.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from experiments.lab import backbones
from experiments.lab.results import RESULTS, settings, write_report
from memjax.config_io import to_record
from memjax.data import Tokenizer
from memjax.models import LanguageModel, ReReadWindow
from memjax.models.adapters import merge_lora
from memjax.models.hmt.model import HMT
from memjax.models.language_model import presets
from memjax.training import LoopConfig, OptimizerConfig, StepConfig
from memjax.training import pretrain as run
from memjax.training.config import Outcome
from memjax.training.finetune import finetune
from memjax.training.finetune.curricula import HMTStages
from memjax.training.finetune.hmt_presets import presets as finetunings
from memjax.training.finetune.segment_stage import SegmentStage

#: In a model's folder: how long its training took. It is there once that is done.
SECONDS = "seconds.json"
Preset = Literal["cpu", "cpu-short", "smollm2-cpu", "paper"]


class Scale(NamedTuple):
    """How a preset trains and tests.

    Attributes:
        backbone: "tiny" is trained here, "smollm2" is the PyPI package's; or a path.
        stages: both stages of HMT.
        test_tokens: scored of each held-out document, at most.
        rates: learning rates that `length` tries for every model.
    """

    backbone: str
    stages: HMTStages
    test_tokens: int
    rates: tuple[float, ...] = (1e-3, 3e-3)


def _stages(base: str, depth: int, steps: tuple[int, int], **sizes) -> HMTStages:
    """Both stages of a preset of `memjax finetune`, with other sizes."""
    two = finetunings()[base]
    assert isinstance(two, HMTStages)

    def stage(config, depth, steps):
        loop = LoopConfig(steps=steps, save_every=50, log_every=4, keep=1)
        memory = dataclasses.replace(config.hmt, **sizes)
        return dataclasses.replace(config, hmt=memory, depth=depth, loop=loop)

    return HMTStages(stage(two.stage1, 2, steps[0]), stage(two.stage2, depth, steps[1]))


def _short() -> HMTStages:
    """The real model in float32, by adapters; every target counts that is predicted."""
    two = _stages(
        "hmt-smollm-135m", 4, (100, 200), segment_length=128, num_sensory_tokens=16
    )

    def stage(config):
        return dataclasses.replace(
            config,
            dtype="float32",
            train="lora",
            optimizer=dataclasses.replace(
                config.optimizer, learning_rate=1e-3, warmup_ratio=0.05, final_ratio=0.0
            ),
            step=StepConfig(loss_on="scored"),
            data=dataclasses.replace(config.data, batch_size=1),
        )

    return HMTStages(stage(two.stage1), stage(two.stage2))


SCALES: dict[Preset, Scale] = {
    "cpu": Scale("tiny", _stages("hmt-tiny", 4, (100, 300), num_memories=300), 102_400),
    "cpu-short": Scale(
        "tiny", _stages("hmt-tiny", 4, (60, 150), num_memories=300), 16_384
    ),
    "smollm2-cpu": Scale("smollm2", _short(), 16_384, rates=(3e-4, 1e-3)),
    "paper": Scale("smollm2", _stages("hmt-smollm-135m", 15, (200, 500)), 102_400),
}


# The backbone that is trained here: 1.2M parameters, attention in every layer.
TINY = dataclasses.replace(presets.TINY, capacity=1024).model(
    "attention", vocab_size=4096
)


@dataclasses.dataclass(frozen=True)
class Config:
    """What every HMT experiment takes.

    Attributes:
        preset: "cpu" takes minutes on two cores, "cpu-short" fewer, as ablations, which
            train many models, take by default; "smollm2-cpu" is the real model with
            100 and 200 short steps; "paper" is 200 and 500 steps, 15 segments of 1,024.
        backbone: "tiny", "smollm2", a Hugging Face folder, a GGUF file or a run's
            folder; "" is the preset's.
        steps: of stage 1 and stage 2; none is the preset's.
        backbone_steps: updates of the tiny backbone.
        test_tokens: scored of each held-out document, at most; 0 is the preset's.
        source: documents, as `memjax train` takes them.
        seed: of new parameters and data order.
        run_dir: where models are kept.
        output: where .json and .png go, without the ending.
    """

    preset: Preset = "cpu"
    backbone: str = ""
    steps: tuple[int, int] | None = None
    backbone_steps: int = 600
    test_tokens: int = 0
    source: str = "embedded"
    seed: int = 0
    run_dir: Path = Path("runs/hmt")
    output: Path = RESULTS / "hmt" / "result"

    def __post_init__(self):
        if self.steps is not None and min(self.steps) < 1:
            raise ValueError(f"steps must be at least 1 and 1, got {self.steps}")
        for name in ("backbone_steps", "test_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")

    @property
    def scale(self) -> Scale:
        """The preset with the changes of the options."""
        scale = SCALES[self.preset]
        stages = scale.stages
        for name, steps in zip(("stage1", "stage2"), self.steps or (), strict=False):
            stage = getattr(stages, name)
            loop = dataclasses.replace(stage.loop, steps=steps)
            changed = dataclasses.replace(stage, loop=loop)
            stages = dataclasses.replace(stages, **{name: changed})
        return Scale(
            self.backbone or scale.backbone,
            stages,
            self.test_tokens or scale.test_tokens,
            scale.rates,
        )


class Trained(NamedTuple):
    """A fine-tuned model, and the seconds that its training took when it was done."""

    model: HMT | LanguageModel | ReReadWindow
    seconds: float


def backbone_path(config: Config) -> Path:
    """The backbone; the tiny one is trained if it is not there."""
    name = config.scale.backbone
    if name == "smollm2":
        return backbones.smollm2()
    if name != "tiny":
        return Path(name)
    run_config = _tiny_run(config)
    folder = config.run_dir / f"backbone-{digest(to_record(run_config))}"
    return _once(folder, "the backbone", lambda: run.train(run_config, folder))


def each_seed(config: Config, seeds: int) -> list[Config]:
    """The experiment with so many seeds from its own on, also of the backbone."""
    return [dataclasses.replace(config, seed=config.seed + i) for i in range(seeds)]


def fine_tuned_on(config: Config, source: str) -> Config:
    """The experiment whose models are fine-tuned on other documents.

    The backbone stays that of the config's own documents.
    """
    backbone = str(backbone_path(config))
    return dataclasses.replace(config, source=source, backbone=backbone)


def load_backbone(config: Config) -> tuple[LanguageModel, Tokenizer]:
    """The backbone as it came, and its tokenizer."""
    found = finetune.load_backbone(backbone_path(config))
    return found.model, found.tokenizer


def _tiny_run(config: Config) -> run.RunConfig:
    """Texts of a few segments."""
    return run.RunConfig(
        model=TINY,
        data=run.DataConfig(
            source=config.source,
            context_length=min(256, TINY.capacity or 256),
            batch_size=8,
        ),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_ratio=0.05),
        loop=LoopConfig(
            steps=config.backbone_steps, save_every=100, log_every=50, keep=1
        ),
        seed=config.seed,
    )


def train_stage(config: Config, stage: SegmentStage, start: Path | None = None) -> Path:
    """Folder of a fine-tuned model; trained unless it is there."""
    backbone = backbone_path(config) if start is None else None
    folder = _folder(config, stage, start)
    what = (
        f"{stage.memory}, {stage.depth} segments of {stage.segment}, "
        f"{stage.loop.steps} steps"
    )
    return _once(
        folder, what, lambda: finetune.finetune(stage, backbone, folder, start)
    )


def is_trained(config: Config, stage: SegmentStage, start: Path | None) -> bool:
    """Whether `train_stage` has nothing to do."""
    return (_folder(config, stage, start) / SECONDS).exists()


def _folder(config: Config, stage: SegmentStage, start: Path | None) -> Path:
    came_from = str(start or backbone_path(config))
    identity = {"stage": to_record(stage), "from": came_from}
    return config.run_dir / f"model-{digest(identity)}"


def load(folder: Path) -> Trained:
    """A model of `train_stage`, adapters joined."""
    _, model = finetune.load(folder)
    assert isinstance(model, HMT | LanguageModel | ReReadWindow), type(model)
    return Trained(merge_lora(model), seconds(folder))


def seconds(folder: Path) -> float:
    """That the training of `train_stage` took when it was done."""
    return json.loads((folder / SECONDS).read_text())


def train_hmt(config: Config, stages: HMTStages) -> Trained:
    """HMT by both stages."""
    first = train_stage(config, of_experiment(config, stages.stage1))
    second = train_stage(config, of_experiment(config, stages.stage2), first)
    model, seconds = load(second)
    return Trained(model, seconds + load(first).seconds)


def train_recurrent(config: Config, stages: HMTStages, sensory: int) -> Trained:
    """The recurrence without retrieval, as many steps in one stage; RMT for k = 0."""
    memory = dataclasses.replace(
        stages.stage2.hmt, retrieval=False, num_sensory_tokens=sensory
    )
    stage = dataclasses.replace(stages.stage2, hmt=memory, loop=_both(stages))
    return load(train_stage(config, of_experiment(config, stage)))


def train_window(config: Config, stages: HMTStages, window: int) -> Trained:
    """The backbone with a window, as many steps; samples of no fewer tokens."""
    tokens = stages.stage2.context_length
    stage = dataclasses.replace(
        stages.stage2,
        memory="window",
        window=window,
        depth=-(-tokens // window),
        loop=_both(stages),
    )
    return load(train_stage(config, of_experiment(config, stage)))


def of_experiment(config: Config, stage: SegmentStage) -> SegmentStage:
    """The stage on the documents of the experiment, with its seed."""
    data = dataclasses.replace(stage.data, source=config.source)
    return dataclasses.replace(stage, data=data, seed=config.seed)


def _both(stages: HMTStages) -> LoopConfig:
    steps = stages.stage1.loop.steps + stages.stage2.loop.steps
    return dataclasses.replace(stages.stage2.loop, steps=steps)


def _once(folder: Path, what: str, train: Callable[[], Outcome]) -> Path:
    """The folder, once its training has finished; programs compile once for all."""
    spent = folder / SECONDS
    if spent.exists():
        return folder
    print(f"training {what}, in {folder}", flush=True)
    if not jax.config.values["jax_compilation_cache_dir"]:
        cache = folder.parent.resolve() / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(cache))
    began = time.monotonic()
    outcome = train()
    if outcome.reason != "finished":
        raise SystemExit(outcome.exit_code)
    spent.write_text(json.dumps(time.monotonic() - began))
    return folder


def write(config: Config, question: str, **results: Any) -> dict[str, Any]:
    """Writes `config.output`.json, with the settings of the training among the results.

    Args:
        config: of the experiment.
        question: that the results answer.
        results: values must be JSON's.

    Returns:
        As `write_report`.
    """
    results = {"training": to_record(config.scale.stages)} | results
    return write_report(config.output, question, settings(config), results)


def digest(record: Any) -> str:
    """A short name of settings, the same for equal ones."""
    text = json.dumps(record, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
