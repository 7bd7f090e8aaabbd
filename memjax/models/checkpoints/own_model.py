"""Build a model from a folder of memjax's own format, which `own_format` describes."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from memjax.config_io import from_record
from memjax.models.checkpoints.own_format import leaf_name, leaves_of, require_tensors
from memjax.models.language_model.config import Dtype, ModelConfig
from memjax.models.language_model.model import LanguageModel


def read_config(
    config: Mapping[str, Any], dtype: Dtype | None, where: str
) -> ModelConfig:
    """The model's configuration in `config.json`; see `build_model`."""
    saved: ModelConfig = from_record(
        ModelConfig, config.get("memjax"), f"{where}: memjax"
    )
    return saved if dtype is None else dataclasses.replace(saved, dtype=dtype)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors."""
    pure = nnx.to_pure_dict(nnx.state(abstract_model(config), nnx.Param))
    return {leaf_name(path): leaf.shape for path, leaf in leaves_of(pure)}


def build_model(
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    get: Callable[[str], np.ndarray],
    dtype: Dtype | None,
    where: str,
) -> LanguageModel:
    """The model that a folder describes.

    Args:
        config: content of `config.json`.
        shapes: of the folder's tensors, by name.
        get: reads a tensor by name, in the dtype that the parameter is to have.
        dtype: of the activations; None is the saved one.
        where: the folder's name in errors.

    Raises:
        ValueError: if the configuration is not a `ModelConfig`, or names or shapes
            differ from those of its model.
    """
    model_config = read_config(config, dtype, where)
    model = abstract_model(model_config)
    state = nnx.state(model, nnx.Param)
    pure = nnx.to_pure_dict(state)
    # All at once and before anything is read: one message names every wrong tensor.
    require_tensors(parameter_shapes(model_config), shapes, where)

    def read(path, _):
        return on_device(get(leaf_name(path)))

    nnx.replace_by_pure_dict(state, jax.tree_util.tree_map_with_path(read, pure))
    nnx.update(model, state)
    return model


def on_device(found: np.ndarray) -> jax.Array:
    """A tensor that was read, as a parameter.

    `jnp.asarray` would copy it, and later: all of a file would be held twice.
    """
    return jax.block_until_ready(jax.device_put(found))


def abstract_model(config: ModelConfig) -> LanguageModel:
    """The model with shapes in the place of arrays."""
    return nnx.eval_shape(lambda: LanguageModel(config, key=jax.random.key(0)))
