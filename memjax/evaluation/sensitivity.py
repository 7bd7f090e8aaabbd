"""Sensitivity of attention layers to a window, measured one layer at a time."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from memjax.checks import check_sizes, require_instance, short
from memjax.models.language_model.config import build_once
from memjax.models.language_model.layers import run_block
from memjax.models.language_model.model import LanguageModel
from memjax.models.language_model.retrofit import attention_layers
from memjax.models.language_model.teacher import read_whole
from memjax.models.language_model.windowed import (
    limit_layer,
    require_unbounded_positions,
)
from memjax.models.loss import target_nll


def layer_sensitivity(
    model: LanguageModel,
    tokens: Int[np.ndarray, "R T"],
    window: int,
    sinks: int = 4,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Float[np.ndarray, " L"]:
    """Rise of the loss with a window in a single layer and full attention elsewhere.

    In nats per token, over the targets beyond the window. Each layer costs a forward
    pass of the layers from there on: (L + 1) / 2 passes per text in all.

    Args:
        model: with attention, whatever else it has.
        tokens: R texts with one more token than is read.
        window: tokens that the layer sees.
        sinks: first tokens that it sees in addition.
        progress: called with layers measured and in total.

    Returns:
        The rise of each layer; NaN for layers without attention.

    Raises:
        ValueError: if no layer is attention, texts end within the window, or the model
            has learned positions.
    """
    check_sizes(window=window)
    check_sizes(least=0, sinks=sinks)
    require_instance("model", model, LanguageModel)
    if getattr(tokens, "ndim", None) is None:
        raise ValueError(f"tokens must be an array [R, T], got {short(tokens)}")
    if tokens.ndim != 2 or tokens.shape[1] <= window + sinks + 1:
        raise ValueError(
            f"tokens must be [R, T] with T > window + sinks + 1 = "
            f"{window + sinks + 1}, got {list(tokens.shape)}"
        )
    require_unbounded_positions(model.config)
    chosen = attention_layers(model.config)
    if not chosen:
        raise ValueError(f"model must have attention, got {model.config.mechanisms}")
    depth = model.config.num_layers
    rises = np.full((len(tokens), depth), np.nan)
    for row, text in enumerate(tokens):
        rest = functools.partial(_loss, model, jnp.asarray(text)[None], window + sinks)
        inputs, h = [], model.enter(model.embed(jnp.asarray(text)[None, :-1]))
        for i in range(depth):
            inputs.append(h)
            h = _layer(model, i, h)
        full = rest(h)
        for count, i in enumerate(chosen):
            h = _layer(model, i, inputs[i], (window, sinks))
            for later in range(i + 1, depth):
                h = _layer(model, later, h)
            rises[row, i] = rest(h) - full
            progress(row * len(chosen) + count + 1, len(tokens) * len(chosen))
    return rises.mean(axis=0)


def most_sensitive(rises: Sequence[float], count: int) -> tuple[int, ...]:
    """Numbers of the `count` layers with the largest rise, first to last.

    Raises:
        ValueError: if fewer have been measured, or on anything but numbers, by name.
    """
    found = np.asarray(rises)
    if found.ndim != 1 or found.dtype.kind not in "fiu":
        raise ValueError(f"rises must be numbers, got {short(rises)}")
    check_sizes(least=0, count=count)
    measured = [i for i, rise in enumerate(rises) if not np.isnan(rise)]
    if not 1 <= count <= len(measured):
        raise ValueError(
            f"count must be in [1, {len(measured)}], the attention layers, got {count}"
        )
    return tuple(sorted(sorted(measured, key=lambda i: -rises[i])[:count]))


def _layer(model, i, h, limits=None):
    """The output of layer i, as it is or, with (window, sinks), windowed."""
    mechanism = model.config.layers[i]
    if limits is not None:
        assert mechanism.plain_attention is not None
        mechanism = limit_layer(mechanism.plain_attention, *limits)
    block = model.blocks[i]
    return _run(model.config, block.style, build_once(mechanism), block.parameters(), h)


# Layers of one kind share a program, which is compiled once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(config, style, mechanism, parameters, h):
    def mix(params, memory, x):
        return memory, read_whole(mechanism, params, x)

    return run_block(config, mix, parameters, None, h, style)[1]


def _loss(model: LanguageModel, text: Array, first: int, h: Array) -> float:
    """Mean loss of the targets from `first` on, from the last layer's output."""
    graph, variables = nnx.split(model)
    return float(_head(graph, variables, h[:, first:], text[:, first + 1 :]))


@functools.partial(jax.jit, static_argnums=0)
def _head(graph, variables, h, targets):
    model = nnx.merge(graph, variables)
    losses = target_nll(model.logits, model.leave(h), targets, model.vocab_size)
    return losses.mean()
