"""Build a model from the tensors of a Hugging Face checkpoint."""

from collections.abc import Callable, Mapping

import jax
import numpy as np
from flax import nnx

from memjax.models.checkpoints.hf.tensor import (
    read_parameter,
    stored_shapes,
    tensors_of,
)
from memjax.models.checkpoints.hf.tensor_names import is_parameter, tensor_names
from memjax.models.checkpoints.own_format import require_tensors
from memjax.models.checkpoints.own_model import abstract_model, on_device
from memjax.models.language_model.config import ModelConfig
from memjax.models.language_model.model import LanguageModel


def parameter_shapes(
    config: ModelConfig, family: str | None = None
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a checkpoint, with the leading "model."."""
    ours = nnx.to_pure_dict(nnx.state(abstract_model(config), nnx.Param))
    theirs = tensors_of(tensor_names(config, family))
    return {
        name: shape
        for tensor, leaf in zip(theirs, jax.tree.leaves(ours), strict=True)
        for name, shape in stored_shapes(tensor, leaf.shape)
    }


def parameters_from_tensors(
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    get: Callable[[str], np.ndarray],
    where: str = "checkpoint",
    family: str | None = None,
) -> LanguageModel:
    """The model with the parameters of a checkpoint.

    Tensors that are no parameters are not read: RoPE's buffers, OPT's version, and the
    copy of the embedding as the head of a tied model.

    Args:
        config: from `from_hf_config`.
        shapes: of the checkpoint's tensors, by name, with or without "model.".
        get: reads a tensor by name, in the dtype that the parameter is to have.
        where: the checkpoint's name in errors.
        family: model_type of the checkpoint; see `tensor_names`.

    Raises:
        ValueError: listing every tensor that is missing, unknown or of another shape;
            or if the head of a tied model is not the embedding.
    """
    model = abstract_model(config)
    state = nnx.state(model, nnx.Param)
    ours = nnx.to_pure_dict(state)
    # Checkpoints of a model without its head lack the leading "model.".
    theirs = tensor_names(config, family)
    root = theirs["embedding"].name.split(".")[0] + "."
    bare = not any(name.startswith(root) for name in shapes)

    def stored(name):
        return name.removeprefix(root) if bare else name

    needed = parameter_shapes(config, family)
    expected = {stored(name): shape for name, shape in needed.items()}
    found = {n: shape for n, shape in shapes.items() if is_parameter(config, n)}
    require_tensors(expected, found, where)
    if config.tied_head and "lm_head.weight" in shapes:
        embedding = get(stored(theirs["embedding"].name))
        if not np.array_equal(get("lm_head.weight"), embedding):
            raise ValueError(
                f"{where}: 'lm_head.weight' must be the embedding in a model with "
                "tie_word_embeddings, found another matrix"
            )

    def read(tensor, leaf):
        return on_device(
            read_parameter(tensor, lambda name: get(stored(name)), leaf.shape)
        )

    values = map(read, tensors_of(theirs), jax.tree.leaves(ours))
    filled = jax.tree.unflatten(jax.tree.structure(ours), values)
    nnx.replace_by_pure_dict(state, filled)
    nnx.update(model, state)
    return model
