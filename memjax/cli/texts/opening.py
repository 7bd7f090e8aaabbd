"""Loading of a command's model, with its status and size on stderr."""

import jax
from flax import nnx

import memjax
from memjax.models.base import Model
from memjax.models.language_model.config import Dtype
from memjax.status import Status, say, size


def load(name: str, dtype: Dtype | None = None) -> memjax.Loaded:
    """The model, as `memjax.load` reads it."""
    with Status(f"loading {name}", "tensors") as status:
        loaded = memjax.load(name, dtype=dtype, progress=status)
    say(described(name, loaded.model))
    return loaded


def described(name: str, model: Model) -> str:
    """Name, kind, parameters and bytes of a model."""
    leaves = jax.tree.leaves(nnx.state(model))
    count = sum(leaf.size for leaf in leaves)
    held = size(sum(leaf.nbytes for leaf in leaves))
    return f"{name}: {type(model).__name__}, {count:,} parameters, {held}"
