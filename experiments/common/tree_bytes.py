"""Bytes of what a model keeps, or of any arrays."""

import jax
from jaxtyping import PyTree


def tree_bytes(tree: PyTree) -> int:
    """Bytes of all arrays, or shapes of arrays, in a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
