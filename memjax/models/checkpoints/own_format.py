"""memjax's own format, for models that no Hugging Face family describes.

`config.json` has the model_type "memjax" and the `ModelConfig`; a tensor's name is the
path of its parameter, as in `blocks.0.mechanism.query`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from memjax.checks import joined, short
from memjax.config_io import to_record
from memjax.models.language_model.config import ModelConfig

MODEL_TYPE = "memjax"
#: Key of `config.json`: the model that a folder was made from.
ORIGIN = "memjax_origin"
#: Key of a memory's `config.json`: the model_type of its backbone.
BACKBONE_TYPE = "backbone_model_type"


def to_config(config: ModelConfig) -> dict[str, Any]:
    """The content of `config.json`."""
    return {"model_type": MODEL_TYPE, "memjax": to_record(config)}


def named_tensors(model: nnx.Module) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values of all parameters, one at a time."""
    for path, value in leaves_of(nnx.to_pure_dict(nnx.state(model, nnx.Param))):
        yield leaf_name(path), np.asarray(value)


def require_tensors(
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    where: str,
) -> None:
    """Raises one ValueError for all missing, unknown and misshapen tensors."""
    wrong = [f"{short(n)} is missing" for n in expected if n not in found]
    wrong += [f"{short(n)} is not of this model" for n in found if n not in expected]
    wrong += [
        f"{short(name)} has the shape {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    if wrong:
        raise ValueError(f"{where}: {len(wrong)} wrong tensors: {joined(wrong)}")


def around_backbone(
    backbone: Mapping[str, Any], model_type: str, memory: Mapping[str, Any]
) -> dict[str, Any]:
    """The `config.json` of a memory around a backbone.

    It has the backbone's entries, which the official programs read, and a model_type of
    its own, so that no other program takes it for the backbone alone.
    """
    # The class that transformers would build.
    plain = {name: value for name, value in backbone.items() if name != "architectures"}
    own = {"model_type": model_type, BACKBONE_TYPE: backbone["model_type"]}
    return plain | dict(memory) | own


def origin_entry(origin: str) -> dict[str, str]:
    """The `config.json` entry of a model's origin, if known."""
    return {ORIGIN: public_name(origin)} if origin else {}


def public_name(origin: str) -> str:
    """The public form of an origin: of a local path its last part."""
    return origin if "@" in origin else Path(origin).name


def of_backbone(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `config.json` of the backbone, from that of a memory around it."""
    if BACKBONE_TYPE not in described:
        return described
    return dict(described) | {"model_type": described[BACKBONE_TYPE]}


def leaves_of(tree: Any) -> list[tuple[Any, Any]]:
    """Paths and leaves of a tree."""
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def leaf_name(path: Any) -> str:
    """A leaf's path in a tree, as in `blocks.0.mechanism.query`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
