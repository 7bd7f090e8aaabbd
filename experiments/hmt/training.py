"""Trainings of the HMT studies, each once for all of them.

The folder of a model is named by a digest of its settings, so studies share models, and
a call that was stopped continues.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.lab.study import digest, train_once, use_compile_cache
from memjax.config_io import to_record
from memjax.training.finetune import finetune
from memjax.training.finetune.curricula import HMTStages
from memjax.training.finetune.segment_stage import SegmentStage

#: Segments that are read in one call.
TOGETHER = 16


class Setting(NamedTuple):
    """What all trainings of a study have in common."""

    backbone: Path | str
    stages: HMTStages
    source: str
    run_dir: Path


def scored(stage: SegmentStage) -> int:
    """Targets that an update scores: none that a summary has read ahead."""
    targets = stage.data.batch_size * stage.context_length
    if stage.memory == "hmt" and stage.hmt.reads_ahead:
        return targets - targets * stage.hmt.summary // stage.hmt.segment_length
    return targets


def with_targets(stage: SegmentStage, targets: int) -> SegmentStage:
    """The stage with the number of updates that scores `targets` targets."""
    loop = dataclasses.replace(stage.loop, steps=round(targets / scored(stage)))
    return dataclasses.replace(stage, loop=loop)


def baseline(stages: HMTStages, segment: int = 0, **changes: Any) -> SegmentStage:
    """Stage 2 as another model, which keeps no memory that gradients are cut in.

    Its samples have no fewer tokens than a `segment` of that model; 0 is HMT's.
    """
    last = stages.stage2
    if segment:
        changes |= {"window": segment, "depth": -(-last.context_length // segment)}
    step = dataclasses.replace(last.step, bptt_blocks=0)
    return dataclasses.replace(last, **{"step": step} | changes)


def rmt(stages: HMTStages) -> SegmentStage:
    """The recurrence alone, its gradients cut as those of HMT."""
    memory = dataclasses.replace(
        stages.stage2.hmt, retrieval=False, num_sensory_tokens=0
    )
    return baseline(stages, hmt=memory, step=stages.stage2.step)


def train(
    setting: Setting,
    stages: Sequence[SegmentStage],
    seed: int,
    rate: float | None = None,
) -> tuple[Path, float]:
    """Trains stages one after the other, unless they are trained.

    Returns the folder of the last stage, and the seconds of all. Without a rate, the
    stages' own is taken.
    """
    use_compile_cache(setting.run_dir)
    folder, seconds = None, 0.0
    for stage in stages:
        data = dataclasses.replace(stage.data, source=setting.source)
        optimizer = stage.optimizer
        if rate is not None:
            optimizer = dataclasses.replace(optimizer, learning_rate=rate)
        stage = dataclasses.replace(stage, data=data, optimizer=optimizer, seed=seed)
        start = folder
        identity = [to_record(stage), str(start or setting.backbone)]
        folder = setting.run_dir / f"model-{digest(identity)}"
        given = stage, setting.backbone if start is None else None, folder, start
        what = f"{stage.memory}, {stage.depth} segments of {stage.segment}, "
        what += f"{stage.loop.steps} steps"
        run = functools.partial(finetune.finetune, *given)
        seconds += train_once(folder, run, what).seconds
    assert folder is not None
    return folder, seconds
