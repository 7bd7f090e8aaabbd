"""Starts the gates of a memory that `add_memory` put beside a window.

Gates read keys and values of a token as they are, whose means are large: their weights
are made for channels of variance 1 and lose the mean, so that a gate starts at its
bias. Gates that forget start with half-lives between two lengths, a head (GSA: a slot)
longer than the one before; a write would be gone within tokens otherwise.

Shapes: X channels of a token that is written, keys and values of all heads.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from memjax.mechanisms import HybridConfig
from memjax.mechanisms.gated_deltanet import GatedDeltaNetParams
from memjax.mechanisms.gla import DAMPING as GLA_DAMPING
from memjax.mechanisms.gla import GLAParams
from memjax.mechanisms.gsa import DAMPING as GSA_DAMPING
from memjax.mechanisms.gsa import GSAParams
from memjax.mechanisms.mamba2 import DecayParams, Mamba2Params
from memjax.mechanisms.trellis import TrellisParams
from memjax.models.language_model.teacher import Moments, shrunk


def start_gates(
    config: HybridConfig,
    params: PyTree,
    moments: Moments,
    half_lives: tuple[float, float],
) -> PyTree:
    """A memory's parameters, whose gates see channels of mean 0 and variance 1.

    Args:
        config: of the layer.
        params: of its memory.
        moments: of the layer.
        half_lives: the shortest and the longest of gates that forget.
    """
    covariance = shrunk(moments.covariance)
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
        # Weights of a gate are those whose first axis is the tokens'.
        if named[jax.tree_util.keystr(path)][:1] != ("model",):
            return leaf
        weight = np.asarray(leaf, np.float64) / scale.reshape(
            -1, *[1] * (leaf.ndim - 1)
        )
        of_mean = np.tensordot(moments.mean, weight, 1)
        weight -= np.multiply.outer(constant, of_mean)
        return jnp.asarray(weight, jnp.float32)

    params = jax.tree_util.tree_map_with_path(normalized, params)
    return slow(params, jnp.asarray(constant, jnp.float32), half_lives)


def slow(
    params: PyTree, constant: Float[Array, " X"], half_lives: tuple[float, float]
) -> PyTree:
    """The parameters, with gates that forget at these half-lives.

    Memories without such a gate stay as they are: DeltaNet, Lattice, linear attention,
    ABC and TTT-linear.
    """
    match params:
        case GatedDeltaNetParams():
            return params._replace(decay=_slow_decay(params.decay, half_lives))
        case Mamba2Params():
            # What passes the memory by is in the window.
            skip = jnp.zeros_like(params.skip)
            return Mamba2Params(_slow_decay(params.decay, half_lives), skip)
        case TrellisParams() if params.forget is not None:
            heads = params.target.shape[1]
            bias = jnp.repeat(
                _logits(half_lives, heads), params.forget.bias.size // heads
            )
            return params._replace(forget=params.forget._replace(bias=bias))
        case GSAParams():
            bias = _logits(half_lives, params.forget.shape[2], GSA_DAMPING)
            return GSAParams(params.forget + constant[:, None, None] * bias[None, None])
        case GLAParams():
            # One of the narrow channels is made constant, and carries the bias.
            bias = _logits(half_lives, params.widen.shape[1], GLA_DAMPING)
            bias = jnp.broadcast_to(bias[:, None], params.widen.shape[1:])
            return GLAParams(
                params.narrow.at[:, 0].set(constant), params.widen.at[0].set(bias)
            )
    return params


def _slow_decay(params: DecayParams, half_lives) -> DecayParams:
    """exp(g) = exp(-rate Δ), with a Δ about 1, by which Mamba-2 writes."""
    pace = params.pace._replace(bias=jnp.full_like(params.pace.bias, np.log(np.e - 1)))
    rate = np.log(2) / np.geomspace(half_lives[0], half_lives[1], len(params.log_rate))
    return DecayParams(pace, jnp.asarray(np.log(rate), jnp.float32))


def _logits(half_lives, count, damping=1.0):
    """z with sigmoid(z)^(1 / damping) = 2^(-1 / half-life)."""
    rate = damping * np.log(2) / np.geomspace(half_lives[0], half_lives[1], count)
    return jnp.asarray(-np.log(np.expm1(rate)), jnp.float32)
