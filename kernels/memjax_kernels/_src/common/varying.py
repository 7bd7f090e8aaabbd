"""Types of arrays inside a `shard_map`: the mesh axes over which they vary."""

from typing import Any

import jax
from jaxtyping import Array


def vary_alike(tree: Any) -> Any:
    """The arrays of a tree, made to vary over every axis that one of them varies over.

    The outputs of a kernel vary so, and a gradient must vary as its argument does.
    """
    leaves = jax.tree.leaves(tree)
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in leaves))

    def vary(x):
        missing = axes - jax.typeof(x).manual_axis_type.varying
        # A cast of the type alone; every device has the values already.
        return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x

    return jax.tree.map(vary, tree)


def like(x: Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """The type of a kernel's output that varies over the axes that `x` varies over."""
    varying = jax.typeof(x).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)


def like_tree(x: Array, tree: Any) -> Any:
    """The types of outputs shaped as a tree's arrays; see `like`."""
    return jax.tree.map(lambda a: like(x, a.shape, a.dtype), tree)
