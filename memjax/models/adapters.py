"""Frozen parameters and LoRA adapters of any model: freeze, thaw, merge.

A trained parameter is an `nnx.Param`; a frozen one is `Frozen`, another kind of
variable, which the optimizer never sees.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from memjax.mechanisms.layers.projections import Adapted
from memjax.nnx.params import as_arrays, copy, is_variable

Model = TypeVar("Model", bound=nnx.Module)


class Frozen(nnx.Variable):
    """A parameter that is not trained."""


def thaw(model: Model, is_trained: Callable[[str], bool]) -> Model:
    """The same model with some frozen parameters trainable again; shares the arrays.

    Args:
        model: of `freeze` or `add_lora`.
        is_trained: whether to train the parameter of a name, as in
            `blocks.0.mechanism.balance.amount`.
    """

    def thawed(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        found = type(leaf) is Frozen and is_trained(name)
        return nnx.Param(leaf.get_value()) if found else leaf

    return jax.tree_util.tree_map_with_path(thawed, copy(model), is_leaf=is_variable)


def freeze(model: Model) -> Model:
    """The same model with all parameters frozen; shares the arrays.

    Raises:
        ValueError: the model has adapters.
    """
    if any(map(_is_adapted, jax.tree.leaves(model, is_leaf=_is_adapted))):
        raise ValueError("model has LoRA adapters already; merge_lora joins them")

    def frozen(leaf):
        return Frozen(leaf.get_value()) if type(leaf) is nnx.Param else leaf

    return jax.tree.map(frozen, copy(model), is_leaf=is_variable)


def merge_lora(model: Model) -> Model:
    """The same function without adapters: changes added, nothing frozen.

    A model without adapters comes back equal. The result shares the arrays that were
    not adapted.
    """

    def merged(leaf):
        if _is_adapted(leaf):
            weight, down, up, scale = as_arrays(leaf)
            return nnx.Param(weight + scale * jnp.tensordot(down, up, axes=1))
        return nnx.Param(leaf.get_value()) if type(leaf) is Frozen else leaf

    def either(node):
        return _is_adapted(node) or is_variable(node)

    return jax.tree.map(merged, copy(model), is_leaf=either)


def _is_adapted(node):
    return isinstance(node, Adapted)
