"""Retrofits, by name: any memory beside the windows of a pretrained model's layers."""

import dataclasses

from memjax.training.config import LoopConfig
from memjax.training.finetune.retrofit_stages import PartConfig, RetrofitStages
from memjax.training.finetune.stage import SampleConfig


def presets() -> dict[str, RetrofitStages]:
    """Retrofits by name.

    "retrofit" reads about a million tokens, a quarter of them for the alignment.
    """
    return {"retrofit-tiny": _tiny(), "retrofit": RetrofitStages()}


def _tiny() -> RetrofitStages:
    """In minutes on a CPU, for a backbone of `memjax train`."""
    default = RetrofitStages()
    shorter = lambda part, steps: PartConfig(
        part.optimizer, LoopConfig(steps=steps, save_every=50)
    )
    return dataclasses.replace(
        default,
        window=64,
        context_length=512,
        count=2,
        data=SampleConfig(batch_size=4, validation_texts=8),
        align=shorter(default.align, 100),
        tune=shorter(default.tune, 300),
    )
