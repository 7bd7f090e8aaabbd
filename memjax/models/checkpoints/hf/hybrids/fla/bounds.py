"""Lower bounds of HGRN2's gates, of all layers in one tensor b of a file.

    l_i = Σ_{1 <= j <= i} softmax(b)_j

The softmax is over layers, each channel for itself, and l_0 is 0.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from memjax.models.language_model.config import ModelConfig

BOUNDS = "model.lower_bounds"
Get = Callable[[str], np.ndarray]
Shapes = Mapping[str, tuple[int, ...]]


def divided_bounds(config: ModelConfig, shapes: Shapes, get: Get) -> tuple[Shapes, Get]:
    """The logits of each layer's bounds, in float32 as gates are."""
    whole = (config.num_layers, config.model_dim)
    if shapes.get(BOUNDS) != whole:
        # Missing or wrong, which names the tensors.
        return shapes, get
    bounded = {f"model.layers.{i}.attn.lower_bound": i for i in _bounded(config)}

    @functools.cache
    def bounds():
        raw = get(BOUNDS).astype(np.float64)
        parts = np.exp(raw - raw.max(axis=0))
        return np.cumsum(parts[1:], axis=0) / parts.sum(axis=0)

    def read(name):
        if name not in bounded:
            return get(name)
        bound = bounds()[bounded[name] - 1]
        return (np.log(bound) - np.log1p(-bound)).astype(np.float32)

    found = {name: shape for name, shape in shapes.items() if name != BOUNDS}
    return found | dict.fromkeys(bounded, whole[1:]), read


def joined_bounds(
    config: ModelConfig, blocks: Mapping[int, Any]
) -> dict[str, np.ndarray]:
    """The tensor of HGRN2's lower bounds by its name; nothing in other families.

    Rows of layers without one are between those of their neighbours.

    Args:
        config: of the model.
        blocks: parameters of its layers.

    Raises:
        ValueError: unless the bounds of every channel grow with the layers.
    """
    if not (layers := _bounded(config)):
        return {}
    logits = [blocks[i]["mechanism"]["cell"]["bound"] for i in layers]
    known = 1 / (1 + np.exp(-np.asarray(logits, np.float64).reshape(len(layers), -1)))
    at = [0, *layers, config.num_layers]
    ends = np.zeros((1, known.shape[1]))
    known = np.concatenate([ends, known, ends + 1])
    every = np.arange(config.num_layers + 1)
    grown = np.stack([np.interp(every, at, column) for column in known.T], axis=1)
    parts = np.diff(grown, axis=0)
    if not (parts > 0).all():
        layer = int(np.argmin((parts > 0).all(axis=1)))
        raise ValueError(
            f"lower bounds must grow with the layers in hgrn2, got some of layer "
            f"{min(layer + 1, config.num_layers - 1)} that do not"
        )
    # The rest up to 1 is layer 0's.
    return {BOUNDS: np.log(np.roll(parts, 1, axis=0)).astype(np.float32)}


def _bounded(config: ModelConfig) -> list[int]:
    """Numbers of the layers that have lower bounds."""
    layers = enumerate(config.layers)
    return [i for i, layer in layers if getattr(layer, "lower_bound", False)]
