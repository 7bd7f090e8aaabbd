"""The same parameters in a model of another config, or with other mechanisms."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from memjax.mechanisms import Mechanism
from memjax.models.language_model.config import ModelConfig, build_once
from memjax.models.language_model.model import LanguageModel
from memjax.nnx.params import replace


def replace_config(model: LanguageModel, **changes: Any) -> LanguageModel:
    """The same parameters in a model with `changes` to its config.

    Mixers may change to others with the same parameters: full attention to a sliding
    window or Elastic Memory, say.

    Raises:
        ValueError: if a mechanism of the new config has other parameters.
    """
    config = dataclasses.replace(model.config, **changes)
    # Compared by shapes before anything changes: the parameters must fit.
    built = tuple(map(build_once, config.layers))

    def shapes(m):
        return jax.eval_shape(m.init_params, jax.random.key(0))

    for block, mechanism in zip(model.blocks, built, strict=True):
        if shapes(block.functions) != shapes(mechanism):
            raise ValueError(f"{changes} changes the parameters of a mechanism")
    return replace_mechanisms(model, config, built)


def replace_mechanisms(
    model: LanguageModel, config: ModelConfig, built: Sequence[Mechanism]
) -> LanguageModel:
    """The same parameters in a new model with this config and these mechanisms."""
    new = replace(model, config=config)
    for block, mechanism in zip(new.blocks, built, strict=True):
        block.config, block.functions = config, mechanism
    return new
