"""Trees of parameters in flax modules: one `nnx.Param` an array.

A module keeps the tree it is given, NamedTuples included, as

    self.params = nnx.data(as_params(mechanism.init_params(key)))

and computes with `as_arrays(self.params)`. A single Param that holds a whole tree would
not do: `nnx.Optimizer` and `nnx.tabulate` take a Param for an array.
"""

from typing import Any

import jax
from flax import nnx
from jaxtyping import PRNGKeyArray, PyTree


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


def params_key(key: PRNGKeyArray | None, rngs: nnx.Rngs | None) -> PRNGKeyArray:
    """The key that a module draws its parameters by: `key`, or the next of `rngs`.

    Raises:
        ValueError: on both, or neither.
    """
    if (key is None) == (rngs is None):
        given = "neither" if key is None else "both"
        raise ValueError(f"give either key=... or rngs=nnx.Rngs(...), got {given}")
    return rngs.params() if key is None else key


def is_variable(node: Any) -> bool:
    """Whether a node of a tree is a Param or another variable of flax."""
    return isinstance(node, nnx.Variable)
