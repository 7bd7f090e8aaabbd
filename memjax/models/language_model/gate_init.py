"""Initialise the gates of a hybrid's memory from the teacher's statistics.

Gates read keys and values, whose means are large: their weights are rescaled to
channels of variance 1 and made orthogonal to the mean, so that a gate starts at its
bias. `CellConfig.with_half_lives` initialises the gates that forget.

Shapes: X channels of a written token: keys and values of all heads.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from memjax.mechanisms import HybridConfig
from memjax.models.language_model.teacher import Moments, shrink_covariance


def initialise_gates(
    config: HybridConfig,
    params: PyTree,
    moments: Moments,
    half_lives: tuple[float, float],
) -> PyTree:
    """The memory's parameters, with gates of channels of mean 0 and variance 1.

    `half_lives` are the shortest and the longest of gates that forget.
    """
    covariance = shrink_covariance(moments.covariance)
    scale = np.sqrt(np.diag(covariance))
    # The map of a token to 1 that varies least from token to token.
    constant = np.linalg.solve(covariance, moments.mean)
    constant = constant / max(moments.mean @ constant, 1e-12)

    named = {
        jax.tree_util.keystr(path): axes
        for path, axes in jax.tree_util.tree_leaves_with_path(
            config.memory.cell_axes(), is_leaf=lambda node: type(node) is tuple
        )
    }

    def normalized(path, leaf):
        # The first axis of a gate's weight is the model's.
        if named[jax.tree_util.keystr(path)][:1] != ("model",):
            return leaf
        weight = np.asarray(leaf, np.float64) / scale.reshape(
            -1, *[1] * (leaf.ndim - 1)
        )
        of_mean = np.tensordot(moments.mean, weight, 1)
        weight -= np.multiply.outer(constant, of_mean)
        return jnp.asarray(weight, jnp.float32)

    params = jax.tree_util.tree_map_with_path(normalized, params)
    constant = jnp.asarray(constant, jnp.float32)
    return config.memory.with_half_lives(params, half_lives, constant)
