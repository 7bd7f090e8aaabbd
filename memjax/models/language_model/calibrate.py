"""Starts what `retrofit` added from statistics of the full model.

Of the keys k of a layer, as its attention has them, with mean μ and covariance Σ:

    φ_k(k) = Σ^-1/2 (k - μ)        φ_q(q) = Σ^1/2 q        φ_qᵀ φ_k = qᵀ (k - μ)

so that keys fill all directions alike and a query still finds the keys that the
attention finds. Values are divided by their root mean square, channel by channel, and
reads multiplied by it. Where a memory has other widths than the heads, the largest
principal directions are kept, or turned into a wider space.

Gates read keys and values as they are, whose means are large: their weights are made
for channels of variance 1 and lose the mean, so that a gate starts at its bias. Gates
that forget start with half-lives from `shortest` to `longest` tokens, a head (GSA: a
slot) longer than the one before; a write would be gone within tokens otherwise.

Other conversions start so too: Liger (https://arxiv.org/abs/2503.01496) takes gates
from the key projection; LoLCATs (https://arxiv.org/abs/2410.10254) learns feature maps
by alignment alone.

Shapes: R texts, T time, H query heads, G key-value heads, K head width, F key and V
value width of the memory, X = 2 G K.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from memjax.mechanisms import BesideConfig
from memjax.mechanisms.beside import BesideParams, FeatureParams
from memjax.mechanisms.gated_deltanet import GatedDeltaNetParams
from memjax.mechanisms.gla import DAMPING as GLA_DAMPING
from memjax.mechanisms.gla import GLAParams
from memjax.mechanisms.gsa import DAMPING as GSA_DAMPING
from memjax.mechanisms.gsa import GSAParams
from memjax.mechanisms.layers import projections
from memjax.mechanisms.mamba2 import DecayParams, Mamba2Params
from memjax.mechanisms.trellis import TrellisParams
from memjax.models.language_model.config import ModelConfig
from memjax.models.language_model.model import LanguageModel
from memjax.models.language_model.retrofit import memory_layers
from memjax.models.language_model.teacher import teach
from memjax.nnx.params import as_arrays, as_params, copy

#: Share of the mean variance in every direction: bounds what whitening amplifies.
SHRINKAGE = 0.1


class Moments(NamedTuple):
    """Mean and covariance of what leaves a window: keys, then values, of all heads."""

    mean: Float[np.ndarray, " X"]
    covariance: Float[np.ndarray, "X X"]


def calibrate(
    model: LanguageModel,
    teacher: ModelConfig,
    tokens: Int[Array, "R T"],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LanguageModel:
    """The model whose new parameters start from the teacher's statistics.

    The gate stays at 0: the model is still the windowed one. Infini's memory, which
    reads heads as they are, has nothing to start.

    Args:
        model: that `retrofit` made, without adapters; it stays as it is.
        teacher: configuration of the model that it was made of.
        tokens: texts of the training documents, read one at a time; the shortest
            half-life is the window, the longest T.
        progress: called with the texts that are read, and all of them.

    Raises:
        ValueError: if the model has no memory beside a window.
    """
    layers = memory_layers(model.config)
    if not layers:
        raise ValueError(
            f"model must have a memory beside a window, got {model.config.mixers}"
        )
    moments = measure(model, teacher, tokens, progress)
    new = copy(model)
    for i in layers:
        config = model.config.layers[i]
        assert isinstance(config, BesideConfig)
        params = as_arrays(model.blocks[i].mixer)
        if params.features is not None:
            started = start(config, params, moments[i], tokens.shape[1])
            # Attention keeps its own variables, which may be frozen.
            block = new.blocks[i]
            block.mixer = nnx.data(
                as_params(started._replace(attention=None))._replace(
                    attention=block.mixer.attention
                )
            )
    return new


def measure(
    model: LanguageModel,
    teacher: ModelConfig,
    tokens: Int[Array, "R T"],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[int, Moments]:
    """Moments of keys and values in the full model, of each layer with a memory."""
    graph, variables = nnx.split(model)
    total: Any = None
    for row in range(len(tokens)):
        sums = _sums(graph, teacher, variables, jnp.asarray(tokens[row : row + 1]))
        # float64: the covariance is a small difference where means are large.
        sums = jax.tree.map(lambda x: np.asarray(x, np.float64), sums)
        total = sums if total is None else jax.tree.map(np.add, total, sums)
        progress(row + 1, len(tokens))
    return {i: _moments(*sums) for i, sums in total.items()}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sums(graph, teacher, variables, tokens):
    """Number, sum and sum of products of what each layer's memory would read."""
    model = nnx.merge(graph, variables)
    sums = {}
    layers = memory_layers(model.config)
    for i, taught in teach(model, teacher, tokens, layers).items():
        heads = model.config.layers[i].window
        attention = as_arrays(model.blocks[i].mixer.attention)
        _, k, v = projections.qkv_projection(heads, attention, taught.x)
        x = jnp.concatenate([k, v], axis=2).astype(jnp.float32)
        # The first tokens are sinks, whose keys are like no other.
        x = x.reshape(-1, x.shape[2] * x.shape[3])[heads.sinks :]
        sums[i] = (x.shape[0], x.sum(axis=0), x.T @ x)
    return sums


def _moments(count, first, second):
    mean = first / count
    return Moments(mean, second / count - np.outer(mean, mean))


def start(
    config: BesideConfig, params: BesideParams, moments: Moments, longest: int
) -> BesideParams:
    """The parameters of one layer, what is new in them started by its moments."""
    window = config.window.window
    half_lives = (window, max(longest, window))
    return params._replace(
        features=start_features(config, params.features, moments),
        memory=start_gates(config, params.memory, moments, half_lives),
    )


def start_features(
    config: BesideConfig, features: Any, moments: Moments
) -> FeatureParams:
    """Maps that whiten each head's keys and scale its values."""
    g, k = config.window.num_kv_heads, config.window.head_dim
    groups = config.window.num_heads // g
    maps = []
    for head in range(config.window.num_heads):
        keys = slice(head // groups * k, (head // groups + 1) * k)
        values = slice((g + head // groups) * k, (g + head // groups + 1) * k)
        query, key = whitening(
            moments.covariance[keys, keys], np.asarray(features.key[head])
        )
        value, read = scaling(
            moments.covariance[values, values],
            moments.mean[values],
            np.asarray(features.value[head]),
        )
        maps.append((query, key, value, read, -moments.mean[keys] @ key))
    query, key, value, read, bias = (
        jnp.asarray(np.stack(x), jnp.float32) for x in zip(*maps, strict=True)
    )
    return FeatureParams(
        query, key, value, read, jnp.zeros(bias.size), bias.reshape(-1)
    )


def whitening(
    covariance: Float[np.ndarray, "K K"], drawn: Float[np.ndarray, "K F"]
) -> tuple[Float[np.ndarray, "K F"], Float[np.ndarray, "K F"]]:
    """Maps of queries and of keys, after which keys have the covariance 1."""
    sizes, directions = np.linalg.eigh(_shrunk(covariance))
    # Largest first.
    roots, directions = sizes[::-1] ** 0.5, directions[:, ::-1]
    turn = _turn(directions, drawn)
    return (directions * roots) @ turn, (directions / roots) @ turn


def scaling(
    covariance: Float[np.ndarray, "K K"],
    mean: Float[np.ndarray, " K"],
    drawn: Float[np.ndarray, "K V"],
) -> tuple[Float[np.ndarray, "K V"], Float[np.ndarray, "V K"]]:
    """Maps of values and of reads: channels of root mean square 1, and back."""
    size = np.sqrt(np.diag(covariance) + mean**2 + 1e-12)
    scaled = covariance / np.outer(size, size)
    directions = np.linalg.eigh(scaled)[1][:, ::-1]
    turn = directions @ _turn(directions, drawn)
    return turn / size[:, None], turn.T * size


def _turn(directions, drawn):
    """From principal directions to the memory's channels, [K, F], F as drawn."""
    width, size = drawn.shape
    if size < width:
        return np.eye(width, size)
    # Back to the channels as they were, or to orthonormal ones of a wider space.
    back = directions.T
    return back if size == width else back @ np.linalg.qr(drawn.T)[0].T


def _shrunk(covariance):
    variance = np.trace(covariance) / len(covariance) + 1e-12
    return (1 - SHRINKAGE) * covariance + SHRINKAGE * variance * np.eye(len(covariance))


def start_gates(
    config: BesideConfig,
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
    covariance = _shrunk(moments.covariance)
    scale = np.sqrt(np.diag(covariance))
    # The map of a token to 1 that varies least from token to token.
    constant = np.linalg.solve(covariance, moments.mean)
    constant = constant / max(moments.mean @ constant, 1e-12)

    named = {
        jax.tree_util.keystr(path): axes
        for path, axes in jax.tree_util.tree_leaves_with_path(
            config.memory.core_axes(), is_leaf=lambda node: type(node) is tuple
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
            return GSAParams(params.forget + constant[:, None, None] * bias)
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
    rate = np.log(2) / np.geomspace(*half_lives, len(params.log_rate))
    return DecayParams(pace, jnp.asarray(np.log(rate), jnp.float32))


def _logits(half_lives, count, damping=1.0):
    """z with sigmoid(z)^(1 / damping) = 2^(-1 / half-life)."""
    rate = damping * np.log(2) / np.geomspace(*half_lives, count)
    return jnp.asarray(-np.log(np.expm1(rate)), jnp.float32)
