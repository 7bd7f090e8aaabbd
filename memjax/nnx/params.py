"""Trees of parameters in flax modules: one `nnx.Param` an array.

A module keeps the tree it is given, NamedTuples included, as

    self.params = nnx.data(as_params(mechanism.init_params(key)))

and computes with `as_arrays(self.params)`. A single Param that holds a whole tree would
not do: `nnx.Optimizer` and `nnx.tabulate` take a Param for an array.
"""

from typing import Any, TypeVar

import jax
from flax import nnx
from jaxtyping import PRNGKeyArray, PyTree

from memjax.checks import check_key

Module = TypeVar("Module", bound=nnx.Module)


def as_params(tree: PyTree) -> Any:
    """The tree with each array in a `nnx.Param` of its own.

    Assign it to an attribute of a module as `nnx.data(as_params(tree))`.
    """
    return jax.tree.map(nnx.Param, tree)


def as_arrays(tree: Any) -> Any:
    """The tree with the array of each `nnx.Variable` in its place."""
    return jax.tree.map(
        lambda leaf: leaf.get_value() if is_variable(leaf) else leaf,
        tree,
        is_leaf=is_variable,
    )


def copy(module: Module) -> Module:
    """A copy of the module with separate variables that share the arrays."""
    return nnx.clone(module)


def replace(module: Module, **attributes: Any) -> Module:
    """A copy of a module with other attributes.

    Args:
        module: any; the copy shares its arrays.
        attributes: trees with Params are assigned as `nnx.data`.
    """
    new = copy(module)
    for name, value in attributes.items():
        # flax needs a mark on attributes that hold variables; plain values are static.
        has_params = any(map(is_variable, jax.tree.leaves(value, is_leaf=is_variable)))
        setattr(new, name, nnx.data(value) if has_params else value)
    return new


def params_key(key: PRNGKeyArray | None, rngs: nnx.Rngs | None) -> PRNGKeyArray:
    """The key of a module's parameters: `key`, or the next of `rngs`.

    Raises:
        ValueError: on both, neither, or other streams than flax's.
    """
    if key is not None and rngs is None:
        check_key(key)
        return key
    if rngs is not None and not hasattr(rngs, "params"):
        raise ValueError(f"rngs must be nnx.Rngs(...), got {rngs!r}")
    if rngs is not None and key is None:
        return rngs.params()
    # One of them exactly: two sources of randomness would leave open which counts.
    given = "neither" if key is None else "both"
    raise ValueError(f"give either key=... or rngs=nnx.Rngs(...), got {given}")


def is_variable(node: Any) -> bool:
    """Whether a node of a tree is a Param or another variable of flax."""
    return isinstance(node, nnx.Variable)
