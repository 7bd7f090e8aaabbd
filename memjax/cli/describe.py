"""One line a preset: what remembers, how large the model is, how much it reads.

    python -m memjax.cli.describe    # writes `preset_lines.py` anew

The lines are kept in a file, because building all presets takes seconds.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memjax.models import ModelConfig
from memjax.training.config import RunConfig
from memjax.training.config import presets as train_presets
from memjax.training.finetune.curricula import HMTStages, MPlusStages
from memjax.training.finetune.hmt_presets import presets as hmt_presets
from memjax.training.finetune.mplus_presets import presets as mplus_presets
from memjax.training.finetune.mplus_stage import MPlusStage
from memjax.training.finetune.retrofit_stage import RetrofitStage
from memjax.training.finetune.retrofit_stages import RetrofitStages
from memjax.training.finetune.retrofit_stages import presets as retrofit_presets
from memjax.training.finetune.segment_stage import SegmentStage
from memjax.training.finetune.stage import NO_MEMORY

FILE = Path(__file__).with_name("preset_lines.py")


def trainings(presets: Mapping[str, RunConfig]) -> str:
    """The lines of `memjax train`: mechanism, layers x width, context."""
    rows = [("preset", "mechanism", "layers x width", "context")]
    for name, config in presets.items():
        model = config.model
        size = f"{model.num_layers} x {model.model_dim:,}"
        context = f"{config.data.context_length:,}"
        rows.append((name, _mechanism(model), size, context))
    return _aligned(rows)


def finetunings(presets: Mapping[str, Any]) -> str:
    """The lines of `memjax finetune`: memory, its sizes, context, steps."""
    rows = [("preset", "memory", "sizes", "context", "steps")]
    for name, config in presets.items():
        if isinstance(config, RetrofitStages):
            # Which layers is not known yet, and makes no difference here.
            config = dataclasses.replace(config, layers=(0,))
        stages = [stage for _, stage in config.stages()]
        steps = " + ".join(f"{stage.loop.steps:,}" for stage in stages)
        last = stages[-1]
        context = f"{last.context_length:,}"
        rows.append((name, _memory(config), _sizes(last), context, steps))
    return _aligned(rows)


def _mechanism(model: ModelConfig) -> str:
    """The mechanisms: one that stands alone by its layer, a few by their order."""
    kinds = [mechanism.name for mechanism in model.mechanisms]
    first = model.mechanisms[0]
    if len(kinds) == 1:
        if first.name == "sliding_window":
            return f"sliding windows of {first.tokens_per_call:,}"
        if first.name == "attention":
            return "full attention"
        return kinds[0]
    alone = [kind for kind in kinds if kinds.count(kind) == 1]
    if len(kinds) == model.num_layers and alone:
        others = next(kind for kind in kinds if kind != alone[0])
        place = kinds.index(alone[0]) + 1
        return f"{alone[0]} in layer {place}, else {others}"
    if len({*kinds[:-1]}) == 1:
        return f"{len(kinds) - 1} x {kinds[0]}, then {kinds[-1]}"
    return ", ".join(kinds)


def _memory(config: Any) -> str:
    """The system, and which of its stages."""
    match config:
        case RetrofitStages():
            return f"{config.memory} in {config.count} layers"
        case HMTStages():
            return "HMT, both stages"
        case MPlusStages():
            return "M+, all three stages"
        case SegmentStage() if config.memory_name == NO_MEMORY:
            return "none: a window"
        case SegmentStage() if config.memory == "reread":
            return "none: the last tokens again"
        case SegmentStage() if config.hmt.retrieval:
            return "HMT, stage 2"
        case SegmentStage():
            return "HMT, stage 1" if config.hmt.num_sensory_tokens else "RMT"
        case MPlusStage() if config.memory.num_retrieved:
            return "M+, stage 3"
    return "MemoryLLM"


def _sizes(stage: SegmentStage | MPlusStage | RetrofitStage) -> str:
    if isinstance(stage, RetrofitStage):
        return f"window {stage.window:,}, {stage.sinks} sinks"
    if isinstance(stage, MPlusStage):
        memory = stage.memory
        store = f", store {memory.store_size:,}" if memory.num_retrieved else ""
        return (
            f"{memory.num_memory_tokens:,} rows a {memory.chunk_size:,}, "
            f"pool {memory.pool_size:,}{store}"
        )
    if stage.memory_name == NO_MEMORY:
        sinks = f", {stage.sinks} sinks" if stage.sinks else ""
        return f"window {stage.window:,}{sinks}"
    if stage.memory == "reread":
        return f"{stage.reread:,} before segments of {stage.window:,}"
    bank = f", bank {stage.hmt.num_memories:,}" if stage.hmt.retrieval else ""
    trained = ", LoRA" if stage.train == "lora" else ""
    return f"segments of {stage.segment:,}{bank}{trained}"


def _aligned(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(f"{cell:{n}}" for cell, n in zip(row, widths, strict=True))
        for row in rows
    )
    return "".join(line.rstrip() + "\n" for line in lines)


def content() -> str:
    """What `preset_lines.py` holds."""
    train = trainings(train_presets())
    finetune = finetunings(hmt_presets() | mplus_presets() | retrofit_presets())
    head = "A line a preset, for help; `python -m memjax.cli.describe` writes them."
    return (
        f'# ruff: noqa: E501\n"""{head}"""\n\n'
        f'TRAIN = """\\\n{train}"""\n\nFINETUNE = """\\\n{finetune}"""\n'
    )


if __name__ == "__main__":
    FILE.write_text(content(), "utf-8")
