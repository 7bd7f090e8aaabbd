"""Initialise a hybrid from its teacher's statistics, for layer-wise distillation.

For the keys k of a layer's attention, with mean μ and covariance Σ:

    φ_k(k) = Σ^-1/2 (k - μ)        φ_q(q) = Σ^1/2 q        φ_qᵀ φ_k = qᵀ (k - μ)

so that keys fill all directions alike and a query still finds the keys that the
attention finds. Values are divided by their root mean square, channel by channel, and
reads multiplied by it. Where a memory has other widths than the heads, the largest
principal directions are kept, or turned into a wider space.

`gate_init.py` initialises the gates. Related conversions: Liger
(https://arxiv.org/abs/2503.01496) takes gates from the key projection; LoLCATs
(https://arxiv.org/abs/2410.10254) learns feature maps by alignment alone.

Shapes: R texts, T time, H query heads, G key-value heads, K head width, F key and V
value width of the memory, X = 2 G K.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from memjax.checks import require_instance, short
from memjax.mechanisms import HybridConfig
from memjax.mechanisms.hybrid import FeatureParams, HybridParams, hybrids
from memjax.models.language_model.config import ModelConfig
from memjax.models.language_model.gate_init import initialise_gates
from memjax.models.language_model.model import LanguageModel
from memjax.models.language_model.retrofit import memory_layers
from memjax.models.language_model.teacher import (
    Moments,
    measure_moments,
    shrink_covariance,
)
from memjax.nnx.params import as_arrays, as_params, copy


def initialise_from_teacher(
    model: LanguageModel,
    teacher: ModelConfig,
    tokens: Int[np.ndarray, "R T"],
) -> LanguageModel:
    """Initialises the new parameters of a hybrid from the teacher's statistics.

    The balance stays at 0: the model is still the windowed one. Infini's memory, which
    reads heads as they are, has nothing to initialise.

    Args:
        model: of `add_memory`, without adapters; it is not changed.
        teacher: configuration of the model before `add_memory`.
        tokens: texts of the training documents, read one at a time; the shortest
            half-life is the window, the longest T.

    Raises:
        ValueError: if the model has no hybrid layer, or on another kind of argument.
    """
    require_instance("model", model, LanguageModel)
    require_instance("teacher", teacher, ModelConfig)
    if getattr(tokens, "ndim", None) != 2:
        raise ValueError(f"tokens must be an array [R, T], got {short(tokens)}")
    if not memory_layers(model.config):
        raise ValueError(
            f"model must have a hybrid layer, got {model.config.mechanisms}"
        )
    moments = measure_moments(model, teacher, tokens)
    return initialise_layers(model, moments, tokens.shape[1])


def initialise_layers(
    model: LanguageModel, moments: Mapping[int, Moments], longest: int
) -> LanguageModel:
    """`initialise_from_teacher` with moments of texts of `longest` tokens."""
    new = copy(model)
    for i, config in hybrids(model.config.layers).items():
        params = as_arrays(model.blocks[i].mechanism)
        if params.features is not None:
            new_params = initialise_layer(config, params, moments[i], longest)
            # Attention keeps its own variables, which may be frozen.
            block = new.blocks[i]
            block.mechanism = nnx.data(
                as_params(new_params._replace(attention=None))._replace(
                    attention=block.mechanism.attention
                )
            )
    return new


def initialise_layer(
    config: HybridConfig, params: HybridParams, moments: Moments, longest: int
) -> HybridParams:
    """The parameters of one layer, with the new ones initialised by its moments."""
    window = config.window.window
    half_lives = (float(window), float(max(longest, window)))
    return params._replace(
        features=initialise_features(config, params.features, moments),
        memory=initialise_gates(config, params.memory, moments, half_lives),
    )


def initialise_features(
    config: HybridConfig, features: Any, moments: Moments
) -> FeatureParams:
    """Feature maps that whiten each head's keys and scale its values."""
    g, k = config.window.num_kv_heads, config.window.head_dim
    heads, memories = config.window.num_heads, config.memory.num_heads
    queries, keys, values, reads, biases = [], [], [], [], []
    for memory in range(memories):
        group = memory * g // memories
        of_keys = slice(group * k, (group + 1) * k)
        of_values = slice((g + group) * k, (g + group + 1) * k)
        query, key = whitening(
            moments.covariance[of_keys, of_keys], np.asarray(features.key[memory])
        )
        value, read = scaling(
            moments.covariance[of_values, of_values],
            moments.mean[of_values],
            np.asarray(features.value[memory]),
        )
        # All that read this memory.
        queries += [query] * (heads // memories)
        reads += [read] * (heads // memories)
        keys.append(key)
        values.append(value)
        biases.append(-moments.mean[of_keys] @ key)

    def stacked(maps):
        return jnp.asarray(np.stack(maps), jnp.float32)

    return FeatureParams(
        query=stacked(queries),
        key=stacked(keys),
        value=stacked(values),
        read=stacked(reads),
        query_bias=jnp.zeros(features.query_bias.size),
        key_bias=stacked(biases).reshape(-1),
    )


def whitening(
    covariance: Float[np.ndarray, "K K"], drawn: Float[np.ndarray, "K F"]
) -> tuple[Float[np.ndarray, "K F"], Float[np.ndarray, "K F"]]:
    """Maps of queries and of keys, after which keys have the covariance 1."""
    sizes, directions = np.linalg.eigh(shrink_covariance(covariance))
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
