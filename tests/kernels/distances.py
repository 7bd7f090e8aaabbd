"""Relative distances between trees, leaf by leaf."""

import jax
import numpy as np


def distances(actual, expected):
    """Relative distance of every leaf, by its path."""
    found = {}
    actual = jax.tree_util.tree_leaves_with_path(actual)
    for (path, a), b in zip(actual, jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        relative = np.sqrt(np.mean((a - b) ** 2) / (np.mean(b**2) + 1e-30))
        found[jax.tree_util.keystr(path)] = relative
    return found


def close(actual, expected, tolerance):
    for path, distance in distances(actual, expected).items():
        assert distance <= tolerance, (path, distance)
