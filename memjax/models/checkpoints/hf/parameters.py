"""Build a model from the tensors of a Hugging Face checkpoint."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from memjax.models.checkpoints.hf.tensor_names import (
    from_stored,
    is_parameter,
    stored_shape,
    tensor_names,
    tensors_of,
)
from memjax.models.checkpoints.own_format import require_tensors
from memjax.models.checkpoints.own_model import abstract_model
from memjax.models.language_model.config import ModelConfig
from memjax.models.language_model.model import LanguageModel


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a checkpoint, with the leading "model."."""
    ours = nnx.to_pure_dict(nnx.state(abstract_model(config), nnx.Param))
    theirs = tensors_of(tensor_names(config))
    return {
        tensor.name: stored_shape(tensor.layout, leaf.shape)
        for tensor, leaf in zip(theirs, jax.tree.leaves(ours), strict=True)
    }


def parameters_from_tensors(
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    get: Callable[[str], np.ndarray],
    where: str = "checkpoint",
) -> LanguageModel:
    """The model with the parameters of a checkpoint.

    Tensors that are no parameters are not read: RoPE's buffers, OPT's version, and the
    copy of the embedding as the head of a tied model.

    Args:
        config: from `from_hf_config`.
        shapes: of the checkpoint's tensors, by name, with or without "model.".
        get: reads a tensor by name, in the dtype that the parameter is to have.
        where: the checkpoint's name in errors.

    Raises:
        ValueError: listing every tensor that is missing, unknown or of another shape;
            or if the head of a tied model is not the embedding.
    """
    model = abstract_model(config)
    state = nnx.state(model, nnx.Param)
    ours = nnx.to_pure_dict(state)
    # Checkpoints of a model without its head lack the leading "model.".
    bare = not any(name.startswith("model.") for name in shapes)

    def stored(name):
        return name.removeprefix("model.") if bare else name

    theirs = tensor_names(config)
    expected = {stored(name): s for name, s in parameter_shapes(config).items()}
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
        return jnp.asarray(
            from_stored(get(stored(tensor.name)), tensor.layout, leaf.shape)
        )

    values = map(read, tensors_of(theirs), jax.tree.leaves(ours))
    filled = jax.tree.unflatten(jax.tree.structure(ours), values)
    nnx.replace_by_pure_dict(state, filled)
    nnx.update(model, state)
    return model
