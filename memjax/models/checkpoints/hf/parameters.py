"""Build a model from the tensors of a Hugging Face checkpoint."""

from collections.abc import Callable, Mapping
from typing import get_args

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
from memjax.models.lora import Target, targets_in
from memjax_kernels._src.stored_product import store


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


def matrices(model: LanguageModel) -> set[str]:
    """Paths of the parameters that `linear` multiplies, the embedding and the head.

    Not those that join projections, which are cut before.
    """
    found = {"embedding", "head"}
    for i, block in enumerate(model.blocks):
        for part in ("mechanism", "feed_forward"):
            names = targets_in(getattr(block, part, None), get_args(Target))
            paths = {f"blocks.{i}.{part}.{name}" for name in names}
            found |= {path for path in paths if not path.endswith("query_key")}
    return found


def parameters_from_tensors(
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    get: Callable[[str], np.ndarray],
    where: str = "checkpoint",
    family: str | None = None,
    *,
    as_stored: bool = False,
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
        as_stored: keep the matrices of products in the fewest bits that hold them, for
            generation alone.

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

    products = matrices(model) if as_stored else ()
    place = _side_by_side()

    def read(tensor, path, leaf):
        found = read_parameter(tensor, lambda name: get(stored(name)), leaf.shape)
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name not in products:
            return on_device(found)
        table = -1 if name == "embedding" else 1
        axes = found.ndim - 1 if tensor.layout == "out_of" else table
        kept = store(found, axes)
        return jax.tree.map(lambda x: on_device(place(x)), kept)

    named = jax.tree_util.tree_leaves_with_path(ours)
    values = map(read, tensors_of(theirs), *zip(*named, strict=True))
    filled = jax.tree.unflatten(jax.tree.structure(ours), values)
    nnx.replace_by_pure_dict(state, filled)
    nnx.update(model, state)
    return model


def _side_by_side(size: int = 1 << 25) -> Callable[[np.ndarray], np.ndarray]:
    """A function that copies arrays into parts of large ones, of `size` bytes or more.

    NumPy asks Linux for large pages where an array has 4 MB. A CPU reads the weights of
    a model from them in a tenth to an eighth less time than from pages of 4 kB.
    """
    free = np.empty(0, np.uint8)

    def place(array):
        nonlocal free
        # XLA takes an array that begins at a multiple of 64 as it is.
        begin = -free.ctypes.data % 64
        if begin + array.nbytes > len(free):
            free = np.empty(max(size, array.nbytes + 64), np.uint8)
            begin = -free.ctypes.data % 64
        end = begin + array.nbytes
        part, free = free[begin:end].view(array.dtype).reshape(array.shape), free[end:]
        part[...] = array
        return part

    return place
