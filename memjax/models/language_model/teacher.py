"""The teacher of layer-wise distillation: full attention in the hybrid layers.

Teacher and student share their weights, and all other layers are windows in both, so
that a layer sees the inputs it will have as a student.

Shapes: R texts, B batch, T time, D model, G key-value heads, K head width, X = 2 G K.
"""

import functools
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from memjax.mechanisms import Mechanism
from memjax.mechanisms.hybrid import attention_params
from memjax.mechanisms.layers import projections
from memjax.models.language_model.config import ModelConfig, build_once
from memjax.models.language_model.layers import run_block
from memjax.models.language_model.model import LanguageModel
from memjax.models.language_model.retrofit import memory_layers
from memjax.nnx.params import as_arrays

#: Share of the mean variance in every direction: bounds what whitening amplifies.
SHRINKAGE = 0.1


class TeacherOutput(NamedTuple):
    """Input and full attention output of one layer of the teacher."""

    x: Float[Array, "B T D"]
    y: Float[Array, "B T D"]


def run_teacher(
    model: LanguageModel,
    teacher: ModelConfig,
    tokens: Int[Array, "B T"],
    layers: Collection[int],
) -> dict[int, TeacherOutput]:
    """Inputs and outputs of full attention in these layers.

    Layers behind the last of them are not computed.

    Args:
        model: of `add_memory`, without adapters.
        teacher: configuration of the model before `add_memory`.
        tokens: full sequences.
        layers: numbers of layers; the others are as in `model`.
    """
    found: dict[int, TeacherOutput] = {}
    h = model.enter(model.embed(tokens))
    for i in range(max(layers) + 1):
        block = model.blocks[i]
        mechanism = build_once((teacher if i in layers else model.config).layers[i])

        def mix(params, memory, x, i=i, mechanism=mechanism):
            y = read_whole(mechanism, attention_params(params), x)
            if i in layers:
                found[i] = TeacherOutput(x, y)
            return memory, y

        _, h = run_block(model.config, mix, block.parameters(), None, h, block.style)
    return found


def read_whole(
    mechanism: Mechanism, params, x: Float[Array, "B T D"]
) -> Float[Array, "B T D"]:
    """Outputs of a mechanism for a full sequence, without its state where it can."""
    if mechanism.whole is not None:
        return mechanism.whole(params, x, None)
    return mechanism.apply(params, mechanism.init_state(x.shape[0]), x)[1]


class Moments(NamedTuple):
    """Mean and covariance of tokens that leave a window: keys, values of all heads."""

    mean: Float[np.ndarray, " X"]
    covariance: Float[np.ndarray, "X X"]


def measure_moments(
    model: LanguageModel,
    teacher: ModelConfig,
    tokens: Int[np.ndarray, "R T"],
) -> dict[int, Moments]:
    """Moments of keys and values in the teacher, of each layer with a memory."""
    graph, variables = nnx.split(model)
    total: Any = None
    for row in range(len(tokens)):
        sums = _sums(graph, teacher, variables, jnp.asarray(tokens[row : row + 1]))
        # float64: the covariance is a small difference where means are large.
        sums = jax.tree.map(lambda x: np.asarray(x, np.float64), sums)
        total = sums if total is None else jax.tree.map(np.add, total, sums)
    return {i: _moments(*sums) for i, sums in total.items()}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sums(graph, teacher, variables, tokens):
    """Number, sum and sum of products of the tokens written to each layer's memory."""
    model = nnx.merge(graph, variables)
    sums = {}
    layers = memory_layers(model.config)
    for i, taught in run_teacher(model, teacher, tokens, layers).items():
        heads = model.config.layers[i].window
        attention = as_arrays(model.blocks[i].mechanism.attention)
        _, k, v = projections.qkv_projection(heads, attention, taught.x)
        x = jnp.concatenate([k, v], axis=2).astype(jnp.float32)
        # The first tokens are sinks, with keys unlike all others.
        x = x.reshape(-1, x.shape[2] * x.shape[3])[heads.sinks :]
        sums[i] = (x.shape[0], x.sum(axis=0), x.T @ x)
    return sums


def _moments(count, first, second):
    mean = first / count
    return Moments(mean, second / count - np.outer(mean, mean))


def shrink_covariance(covariance: Float[np.ndarray, "X X"]) -> Float[np.ndarray, "X X"]:
    """A covariance, shrunk towards its mean variance in every direction."""
    variance = np.trace(covariance) / len(covariance) + 1e-12
    return (1 - SHRINKAGE) * covariance + SHRINKAGE * variance * np.eye(len(covariance))
