"""Models of published configurations, from the mechanisms of their layers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from memjax.checks import short
from memjax.mechanisms import MechanismConfig
from memjax.models.checkpoints.hf.fields import read_entry, read_layers, read_size
from memjax.models.checkpoints.hf.hybrids.mixers import read_epsilon
from memjax.models.language_model.config import (
    Architecture,
    BlockStyle,
    Dtype,
    ModelConfig,
    period,
)

LINEAR, FULL = "linear_attention", "full_attention"
# Names of older files.
RENAMED = {"mamba": LINEAR, "attention": FULL}


def model_of_layers(
    config: Mapping[str, Any],
    mechanisms: Sequence[MechanismConfig],
    dtype: Dtype,
    tied: bool = False,
    styles: Sequence[BlockStyle] = (),
    hidden: int | None = None,
    epsilon: float | None = None,
    **architecture: Any,
) -> ModelConfig:
    """The model of these layers; the period is that of mechanisms and styles.

    `tied` is the default of the head's tie, `hidden` and `epsilon` are None where the
    file has them by their usual keys.
    """
    pairs = period(zip(mechanisms, styles or [None] * len(mechanisms), strict=True))
    kinds, around = zip(*pairs, strict=True)
    return ModelConfig(
        mechanisms=kinds,
        styles=around if styles else (),
        num_layers=len(mechanisms),
        vocab_size=read_size(config, "vocab_size"),
        model_dim=read_size(config, "hidden_size"),
        hidden_dim=hidden or read_size(config, "intermediate_size"),
        architecture=Architecture(scale_embedding=False, **architecture),
        norm_epsilon=read_epsilon(config) if epsilon is None else epsilon,
        tied_head=read_entry(config, "tie_word_embeddings", bool, tied),
        dtype=dtype,
    )


def layer_kinds(
    config: Mapping[str, Any],
    default: Callable[[int], str],
    allowed: tuple[str, ...] = (LINEAR, FULL),
) -> list[str]:
    """The kind of each layer; `default` gives that of a layer where the file does not.

    Raises:
        ValueError: naming the first layer of another kind.
    """
    layers = read_layers(config)
    given = read_entry(config, "layer_types", list, list(map(default, range(layers))))
    kinds = [RENAMED.get(k, k) if isinstance(k, str) else k for k in given]
    if len(kinds) != layers:
        raise ValueError(
            f"layer_types must name {layers} layers, got {len(kinds)}: {short(given)}"
        )
    for i, kind in enumerate(kinds):
        if kind not in allowed:
            known = " or ".join(map(repr, allowed))
            raise ValueError(f"layer_types[{i}] must be {known}, got {short(kind)}")
    return kinds
