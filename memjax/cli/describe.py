"""Summaries of all presets: mechanism, sizes, context, steps.

    python -m memjax.cli.describe    # rewrites `presets.txt`

They are generated, because building all presets takes seconds.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memjax.models import ModelConfig
from memjax.training.config import RunConfig
from memjax.training.config import presets as train_presets
from memjax.training.finetune.hmt_presets import presets as hmt_presets
from memjax.training.finetune.mplus_presets import presets as mplus_presets
from memjax.training.finetune.retrofit_stages import presets as retrofit_presets

FILE = Path(__file__).with_name("presets.txt")


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
        if getattr(config, "layers", None) == "auto":
            # Any layers do: the line does not name them.
            config = dataclasses.replace(config, layers=(0,))
        stages = [stage for _, stage in config.stages()]
        steps = " + ".join(f"{stage.loop.steps:,}" for stage in stages)
        rows.append((name, *config.summary(), f"{stages[-1].context_length:,}", steps))
    return _aligned(rows)


def _mechanism(model: ModelConfig) -> str:
    """The mechanisms of the layers, in short."""
    kinds = [mechanism.name for mechanism in model.mechanisms]
    first: Any = model.mechanisms[0]
    if len(kinds) == 1:
        if first.name == "sliding_window":
            return f"sliding windows of {first.tokens_per_call:,}"
        if first.name == "attention":
            return "full attention"
        if first.name == "hybrid":
            return f"hybrids with {first.memory.name}"
        return kinds[0]
    alone = [kind for kind in kinds if kinds.count(kind) == 1]
    if len(kinds) == model.num_layers and alone:
        others = next(kind for kind in kinds if kind != alone[-1])
        place = kinds.index(alone[-1]) + 1
        return f"{alone[-1]} in layer {place}, else {others}"
    if len({*kinds[:-1]}) == 1:
        return f"{len(kinds) - 1} x {kinds[0]}, then {kinds[-1]}"
    return ", ".join(kinds)


def _aligned(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(f"{cell:{n}}" for cell, n in zip(row, widths, strict=True))
        for row in rows
    )
    return "".join(line.rstrip() + "\n" for line in lines)


def content() -> str:
    """The content of `presets.txt`: both tables, with an empty line between."""
    train = trainings(train_presets())
    finetune = finetunings(hmt_presets() | mplus_presets() | retrofit_presets())
    return f"{train}\n{finetune}"


if __name__ == "__main__":
    FILE.write_text(content(), "utf-8")
