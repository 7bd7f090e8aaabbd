"""Loading of a command's model, with its status and size on stderr."""

from typing import Any

import jax
from flax import nnx

import memjax
from memjax.models.base import Model, named_parameters
from memjax.models.language_model.config import Dtype
from memjax.status import Status, say, size


def load(
    name: str, dtype: Dtype | None = None, *, for_generation: bool = False
) -> memjax.Loaded:
    """The model, as `memjax.load` reads it."""
    options: Any = {"dtype": dtype, "for_generation": for_generation}
    with Status(f"loading {name}", "tensors") as status:
        loaded = memjax.load(name, **options, progress=status)
    say(described(name, loaded.model))
    return loaded


def described(name: str, model: Model) -> str:
    """Name, kind, parameters and bytes of a model."""
    count = sum(leaf.size for _, leaf in named_parameters(model))
    held = size(sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model))))
    return f"{name}: {type(model).__name__}, {count:,} parameters, {held}"
