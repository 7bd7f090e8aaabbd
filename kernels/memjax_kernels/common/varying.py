"""Under `shard_map`, which mesh axes the arrays around a kernel vary over."""

from typing import Any

import jax
from jaxtyping import Array


def vary_alike(tree: Any) -> Any:
    """Arrays that vary over the axes over which any of them does.

    A kernel's outputs do, and a gradient must vary over the axes of its argument.
    """
    leaves = jax.tree.leaves(tree)
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in leaves))

    def vary(x):
        missing = axes - jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x

    return jax.tree.map(vary, tree)


def like(x: Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An output that varies over the axes that `x` varies over."""
    varying = jax.typeof(x).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)
