"""memjax's own format, for models that no Hugging Face family describes.

`config.json` has the model_type "memjax" and the `ModelConfig`; a tensor's name is the
path of its parameter, as in `blocks.0.mixer.query`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float32

from memjax.config_io import from_record, to_record
from memjax.models.language_model.config import Dtype, ModelConfig
from memjax.models.language_model.model import LanguageModel

MODEL_TYPE = "memjax"


def to_config(model: LanguageModel) -> dict[str, Any]:
    """The content of `config.json`."""
    return {"model_type": MODEL_TYPE, "memjax": to_record(model.config)}


def named_tensors(model: LanguageModel) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values of all parameters, one at a time."""
    for path, value in leaves_of(nnx.to_pure_dict(nnx.state(model, nnx.Param))):
        yield leaf_name(path), np.asarray(value)


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
    pure = nnx.to_pure_dict(nnx.state(_abstract(config), nnx.Param))
    return {leaf_name(path): leaf.shape for path, leaf in leaves_of(pure)}


def build_model(
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    get: Callable[[str], Float32[np.ndarray, "..."]],
    dtype: Dtype | None,
    where: str,
) -> LanguageModel:
    """The model that a folder describes.

    Args:
        config: content of `config.json`.
        shapes: of the folder's tensors, by name.
        get: reads a tensor by name.
        dtype: of the activations; None is the saved one.
        where: the folder's name in errors.

    Raises:
        ValueError: if the configuration is not a `ModelConfig`, or names or shapes
            differ from those of its model.
    """
    model_config = read_config(config, dtype, where)
    model = _abstract(model_config)
    state = nnx.state(model, nnx.Param)
    pure = nnx.to_pure_dict(state)
    # All at once and before anything is read: one message names every wrong tensor.
    require_tensors(parameter_shapes(model_config), shapes, where)
    read = lambda path, _: jnp.asarray(get(leaf_name(path)))
    nnx.replace_by_pure_dict(state, jax.tree_util.tree_map_with_path(read, pure))
    nnx.update(model, state)
    return model


def require_tensors(
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    where: str,
) -> None:
    """Raises one ValueError that lists all missing, unknown and misshapen tensors."""
    wrong = [f"{n!r} is missing" for n in expected if n not in found]
    wrong += [f"{n!r} is not of this model" for n in found if n not in expected]
    wrong += [
        f"{name!r} has the shape {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    if wrong:
        raise ValueError(f"{where}: {len(wrong)} wrong tensors: {'; '.join(wrong)}")


def _abstract(config: ModelConfig) -> LanguageModel:
    return nnx.eval_shape(lambda: LanguageModel(config, key=jax.random.key(0)))


def leaves_of(tree: Any) -> list[tuple[Any, Any]]:
    """Paths and leaves of a tree."""
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def leaf_name(path: Any) -> str:
    """A leaf's path in a tree, as in `blocks.0.mixer.query`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
