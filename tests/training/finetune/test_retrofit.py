"""A retrofit from its choice of layers to the model that is opened again."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from memjax.mechanisms import BesideConfig
from memjax.training.config import LoopConfig
from memjax.training.finetune.any_model import open_model
from memjax.training.finetune.finetune import finetune_stages
from memjax.training.finetune.retrofit_stage import RetrofitStage
from memjax.training.finetune.retrofit_stages import (
    LAYERS_FILE,
    PartConfig,
    RetrofitStages,
    with_layers,
)
from memjax.training.optimizer import OptimizerConfig

SMALL = PartConfig(
    OptimizerConfig(learning_rate=1e-2, weight_decay=0.0),
    LoopConfig(steps=2, save_every=1, log_every=1),
)


def small(data, **changes):
    return RetrofitStages(
        memory="gated_deltanet",
        window=4,
        sinks=1,
        context_length=12,
        start_texts=2,
        count=1,
        choose_texts=2,
        data=data,
        align=SMALL,
        tune=SMALL,
    )


@pytest.fixture(scope="module", name="trained")
def _trained(base, tmp_path_factory):
    backbone, data = base
    folder = tmp_path_factory.mktemp("retrofit")
    config = with_layers(small(data), backbone, folder)
    finetune_stages(config.stages(), backbone, folder)
    return folder


def test_both_parts_train_what_is_theirs(trained, base):
    backbone, _ = base
    original = open_model(backbone).model
    run = open_model(trained)
    print(run.model)
