"""Shapes and dtypes of the leaves of a state, by name, and their comparison."""

from typing import Any

import jax
from jax.sharding import SingleDeviceSharding
from jaxtyping import PyTree


def abstract(state: PyTree) -> PyTree:
    """The same tree with each array replaced by its shape, dtype and sharding."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=getattr(x, "sharding", None)
        ),
        state,
    )


def with_shardings(state: PyTree) -> PyTree:
    """`abstract`, with leaves that have no sharding put on the first device."""
    first = SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or first),
        abstract(state),
    )


def describe(state: PyTree) -> dict[str, dict[str, Any]]:
    """Maps each leaf's name, such as `.params['w']`, to its shape and dtype.

    Raises:
        ValueError: a leaf is not a JAX array or a `jax.ShapeDtypeStruct`.
    """
    named = jax.tree_util.tree_leaves_with_path(state)
    description = {}
    for path, leaf in named:
        name = jax.tree_util.keystr(path)
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise ValueError(
                f"state leaf {name} must be a JAX array, got {type(leaf).__name__}"
            )
        description[name] = {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
    return description


def require_same(
    found: dict[str, dict[str, Any]], expected: dict[str, dict[str, Any]], where: str
) -> None:
    """Raises ValueError naming the leaves in which two descriptions differ."""
    lines = []
    for name in [*expected, *(n for n in found if n not in expected)]:
        if found.get(name) != expected.get(name):
            lines.append(
                f"{name}: expected {_words(expected.get(name))}, "
                f"found {_words(found.get(name))}"
            )
    if lines:
        more = f"; and {len(lines) - 5} more" if len(lines) > 5 else ""
        raise ValueError(f"{where} holds another state: {'; '.join(lines[:5])}{more}")


def _words(leaf: dict[str, Any] | None) -> str:
    if leaf is None:
        return "no such leaf"
    return f"{leaf['dtype']}[{','.join(str(n) for n in leaf['shape'])}]"
