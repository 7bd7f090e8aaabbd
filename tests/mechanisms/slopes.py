"""Gradients held to finite differences, which run programs that are compiled anyway."""

import jax
import numpy as np


def check_slopes(function, at, gradients):
    """The gradient with respect to each leaf is that of finite differences."""
    leaves, tree = jax.tree.flatten(at)
    value, draws = function(at), np.random.default_rng(0)
    for i, (leaf, gradient) in enumerate(
        zip(leaves, jax.tree.leaves(gradients), strict=True)
    ):
        leaf, gradient = np.asarray(leaf), np.asarray(gradient)
        steepest = np.linalg.norm(gradient)
        # Half of the way along the gradient, half of it in any direction.
        along = draws.standard_normal(leaf.shape)
        along = along / np.linalg.norm(along) + gradient / max(steepest, 1e-30)

        def moved(by, i=i, leaf=leaf, along=along):
            changed = (leaf + by * along).astype(leaf.dtype)
            return function(
                jax.tree.unflatten(tree, [*leaves[:i], changed, *leaves[i + 1 :]])
            )

        found = slope(moved, min(0.01, 0.005 * abs(value) / max(steepest, 1e-30)))
        expected = np.vdot(gradient, along)
        np.testing.assert_allclose(found, expected, atol=5e-3 * float(steepest) + 2e-4)


def slope(function, h):
    """The derivative of a function at 0, up to the fourth power of `h`."""
    near, far = (function(by) - function(-by) for by in (h, 2 * h))
    return (8 * near - far) / (12 * h)


def flat(tree):
    """All numbers of a tree."""
    return np.concatenate(
        [np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)]
    )
