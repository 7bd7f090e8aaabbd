"""Backbones and trainings of the HMT studies, each trained once for all of them.

A backbone is a pretrained model, or a tiny one that is trained on the documents of the
study. The folder of a fine-tuned model is named by a digest of its settings, so studies
share models, and a call that was stopped continues.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from experiments.lab import backbones
from experiments.lab.measure import score_text
from experiments.lab.results import RESULTS, settings, write_report
from experiments.lab.study import digest, spent, train_once, use_compile_cache
from memjax.checks import check_seed
from memjax.config_io import to_record
from memjax.data import Split, TokenisedDocument, Tokenizer, load_tokens
from memjax.evaluation import TokenLosses
from memjax.models import LanguageModel
from memjax.models.adapters import merge_lora
from memjax.models.base import Model
from memjax.training import LoopConfig, StepConfig
from memjax.training.finetune import finetune
from memjax.training.finetune.curricula import HMTStages
from memjax.training.finetune.hmt_presets import presets
from memjax.training.finetune.segment_stage import SegmentStage

#: Segments that are read in one call.
TOGETHER = 16
Preset = Literal["cpu", "cpu-short", "smollm2-cpu", "paper"]


class Scale(NamedTuple):
    """Sizes of a preset.

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


def _stages(base: str, depth: int, steps: tuple[int, int], **sizes: int) -> HMTStages:
    """Both stages of a preset of `memjax finetune`, with other sizes."""
    two = cast(HMTStages, presets()[base])

    def stage(config: SegmentStage, depth: int, steps: int) -> SegmentStage:
        loop = LoopConfig(steps=steps, save_every=50, log_every=4, keep=1)
        memory = dataclasses.replace(config.hmt, **sizes)
        return dataclasses.replace(config, hmt=memory, depth=depth, loop=loop)

    return HMTStages(stage(two.stage1, 2, steps[0]), stage(two.stage2, depth, steps[1]))


def _short() -> HMTStages:
    """The real model in float32, by adapters; every target counts that is predicted."""
    two = _stages(
        "hmt-smollm-135m", 4, (100, 200), segment_length=128, num_sensory_tokens=16
    )

    def stage(config: SegmentStage) -> SegmentStage:
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


def scales() -> dict[Preset, Scale]:
    """The presets by name."""
    tiny = _stages("hmt-tiny", 4, (100, 300), num_memories=300)
    short = _stages("hmt-tiny", 4, (60, 150), num_memories=300)
    paper = _stages("hmt-smollm-135m", 15, (200, 500))
    return {
        "cpu": Scale("tiny", tiny, 102_400),
        "cpu-short": Scale("tiny", short, 16_384),
        "smollm2-cpu": Scale("smollm2", _short(), 16_384, rates=(3e-4, 1e-3)),
        "paper": Scale("smollm2", paper, 102_400),
    }


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of every HMT study.

    Attributes:
        preset: "cpu" takes minutes on two cores, "cpu-short" fewer, as for studies that
            train many models; "smollm2-cpu" is the real model with 100 and 200 short
            steps; "paper" is 200 and 500 steps, 15 segments of 1,024.
        backbone: "tiny", "smollm2", or a model as `memjax finetune` takes it; "" is the
            preset's.
        steps: of stage 1 and stage 2; none is the preset's.
        backbone_steps: updates of the tiny backbone.
        test_tokens: scored of each held-out document, at most; 0 is the preset's.
        source: documents, as `memjax train` takes them.
        seeds: of new parameters and data order.
        run_dir: where models are stored.
        output: where .json and .png go, without the ending.
    """

    preset: Preset = "cpu"
    backbone: str = ""
    steps: tuple[int, int] | None = None
    backbone_steps: int = 600
    test_tokens: int = 0
    source: str = "embedded"
    seeds: tuple[int, ...] = (0, 1)
    run_dir: Path = Path("runs/hmt")
    output: Path = RESULTS / "hmt" / "result"

    def __post_init__(self):
        if self.steps is not None and min(self.steps) < 1:
            raise ValueError(f"steps must be at least 1 and 1, got {self.steps}")
        for name in ("backbone_steps", "test_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if not self.seeds:
            raise ValueError("seeds must name at least one")
        for seed in self.seeds:
            check_seed(seed)

    @property
    def scale(self) -> Scale:
        """The preset with the changes of the options."""
        scale = scales()[self.preset]
        stages = scale.stages
        for name, steps in zip(("stage1", "stage2"), self.steps or (), strict=False):
            stage = getattr(stages, name)
            loop = dataclasses.replace(stage.loop, steps=steps)
            changed = dataclasses.replace(stage, loop=loop)
            stages = dataclasses.replace(stages, **{name: changed})
        return scale._replace(
            backbone=self.backbone or scale.backbone,
            stages=stages,
            test_tokens=self.test_tokens or scale.test_tokens,
        )


def backbone_path(config: Config) -> Path | str:
    """The backbone; the tiny one is trained first, with the first seed."""
    name = config.scale.backbone
    if name != "tiny":
        return backbones.located(name)
    run = backbones.tiny_run(config.source, config.backbone_steps, config.seeds[0])
    return backbones.tiny_backbone(run, config.run_dir)


def load_backbone(config: Config) -> tuple[LanguageModel, Tokenizer]:
    """The backbone as it came, and its tokenizer."""
    found = finetune.load_backbone(backbone_path(config))
    return found.model, found.tokenizer


def train(
    config: Config,
    stages: Sequence[SegmentStage],
    seed: int,
    rate: float | None = None,
    source: str = "",
) -> tuple[Path, float]:
    """Trains stages one after the other, unless they are trained.

    Args:
        config: of the study.
        stages: at least one.
        seed: of new parameters and data order.
        rate: learning rate; None is the stages' own.
        source: documents; "" are those of the study.

    Returns:
        The folder of the last stage, and the seconds of all.
    """
    use_compile_cache(config.run_dir)
    folder, seconds = None, 0.0
    for stage in stages:
        data = dataclasses.replace(stage.data, source=source or config.source)
        optimizer = stage.optimizer
        if rate is not None:
            optimizer = dataclasses.replace(optimizer, learning_rate=rate)
        stage = dataclasses.replace(stage, data=data, optimizer=optimizer, seed=seed)
        folder, start = _folder(config, stage, folder), folder
        seconds += _train_stage(config, stage, folder, start)
    assert folder is not None
    return folder, seconds


def _folder(config: Config, stage: SegmentStage, start: Path | None) -> Path:
    before = str(start or backbone_path(config))
    identity = {"stage": to_record(stage), "from": before}
    return config.run_dir / f"model-{digest(identity)}"


def _train_stage(
    config: Config, stage: SegmentStage, folder: Path, start: Path | None
) -> float:
    backbone = backbone_path(config) if start is None else None
    train_once(
        folder,
        lambda: finetune.finetune(stage, backbone, folder, start),
        f"{stage.memory}, {stage.depth} segments of {stage.segment}, "
        f"{stage.loop.steps} steps",
    )
    return spent(folder).seconds


def load(folder: Path) -> Model:
    """A model of `train`, adapters merged."""
    return merge_lora(finetune.load(folder)[1])


def recurrent_stage(stages: HMTStages, sensory: int = 0) -> SegmentStage:
    """The recurrence without retrieval, as many steps in one stage; RMT for k = 0."""
    memory = dataclasses.replace(
        stages.stage2.hmt, retrieval=False, num_sensory_tokens=sensory
    )
    return dataclasses.replace(baseline_stage(stages), hmt=memory)


def window_stage(stages: HMTStages, window: int, sinks: int = 0) -> SegmentStage:
    """The backbone with a window, as many steps; samples of no fewer tokens."""
    return dataclasses.replace(
        baseline_stage(stages),
        memory="window",
        window=window,
        sinks=sinks,
        depth=-(-stages.stage2.context_length // window),
    )


def reread_stage(stages: HMTStages, reread: int, segment: int) -> SegmentStage:
    """The backbone on segments with the tokens before them, as many steps."""
    return dataclasses.replace(
        baseline_stage(stages),
        memory="reread",
        window=segment,
        reread=reread,
        depth=-(-stages.stage2.context_length // segment),
    )


def baseline_stage(stages: HMTStages) -> SegmentStage:
    """Stage 2 with as many steps as both."""
    steps = stages.stage1.loop.steps + stages.stage2.loop.steps
    loop = dataclasses.replace(stages.stage2.loop, steps=steps)
    return dataclasses.replace(stages.stage2, loop=loop)


def documents(
    source: str, tokenizer: Tokenizer, split: Split, tokens: int, segment: int
) -> tuple[TokenisedDocument, ...]:
    """Documents cut to whole segments, at most `tokens`, and one target more."""
    cut = []
    for document in load_tokens(source, tokenizer, split):
        size = min(tokens, len(document.tokens) - 1) // segment * segment
        if size:
            tokens_of = np.asarray(document.tokens[: size + 1])
            cut.append(document._replace(tokens=tokens_of))
    if not cut:
        raise ValueError(f"no document of {source!r} has a segment of {segment} tokens")
    return tuple(cut)


def scorer(model: Model, segment: int) -> Callable[[TokenisedDocument], TokenLosses]:
    """The function that scores one text, several segments a call."""
    return score_text(model, TOGETHER * segment)


def write(config: Config, question: str, **results: Any) -> dict[str, Any]:
    """Writes `config.output`.json, with the settings of the training among the results.

    Args:
        config: of the study.
        question: that the results answer.
        results: values must be JSON's.

    Returns:
        As `write_report`.
    """
    results = {"training": to_record(config.scale.stages)} | results
    return write_report(config.output, question, settings(config), results)
