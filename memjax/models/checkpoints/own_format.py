"""Models without a Hugging Face family: safetensors under memjax's own names.

`config.json` says model_type "memjax" and holds the `ModelConfig`; a tensor's name is
the path of its parameter, as in `blocks.0.mixer.query`.
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
    """What `config.json` holds."""
    return {"model_type": MODEL_TYPE, "memjax": to_record(model.config)}


def tensors(model: LanguageModel) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values of all parameters, one at a time."""
    for path, value in leaves_of(nnx.to_pure_dict(nnx.state(model, nnx.Param))):
        yield leaf_name(path), np.asarray(value)


def read_sizes(
    config: Mapping[str, Any], dtype: Dtype | None, where: str
) -> ModelConfig:
    """The model's configuration in `config.json`; see `build`."""
    kept: ModelConfig = from_record(
        ModelConfig, config.get("memjax"), f"{where}: memjax"
    )
    return kept if dtype is None else dataclasses.replace(kept, dtype=dtype)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors."""
    pure = nnx.to_pure_dict(nnx.state(_abstract(config), nnx.Param))
    return {leaf_name(path): leaf.shape for path, leaf in leaves_of(pure)}


def build(
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    get: Callable[[str], Float32[np.ndarray, "..."]],
    dtype: Dtype | None,
    where: str,
) -> LanguageModel:
    """The model that a folder describes.

    Args:
        config: what `config.json` holds.
        shapes: of the folder's tensors, by name.
        get: reads a tensor.
        dtype: of the activations; None as it was saved.
        where: what an error calls the folder.

    Raises:
        ValueError: if the configuration is not one, or names or shapes differ from
            those of its model.
    """
    kept = read_sizes(config, dtype, where)
    model = _abstract(kept)
    state = nnx.state(model, nnx.Param)
    pure = nnx.to_pure_dict(state)
    require_tensors(parameter_shapes(kept), shapes, where)
    read = lambda path, _: jnp.asarray(get(leaf_name(path)))
    nnx.replace_by_pure_dict(state, jax.tree_util.tree_map_with_path(read, pure))
    nnx.update(model, state)
    return model


def require_tensors(
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    where: str,
) -> None:
    """Raises one ValueError with all tensors that lack, are too many or misshapen."""
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
    """A leaf's place in a tree, as in `blocks.0.mixer.query`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
