"""The first difference of two models' configurations that changes their logits."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from memjax.mechanisms import AttentionConfig
from memjax.mechanisms.layers.heads import HeadsConfig
from memjax.mechanisms.layers.recurrent.style import RecurrentSizes
from memjax.models.language_model.config import Architecture, ModelConfig
from memjax.models.language_model.hidden.router import ExpertsConfig

# How a model runs, and the sizes of its first cache.
_WITHOUT_EFFECT = {
    *("dtype", "remat", "remat_saves", "scan_layers"),
    *("initial_slots", "implementation"),
}
# Compared layer by layer instead.
_BY_LAYER = {"mechanisms", "styles", "hidden_dim"}
_OF_STYLES = ("norm_first", "norm_outputs", "feed_forward")


def require_same(found: ModelConfig, expected: ModelConfig, family: str) -> None:
    """Raises ValueError for the first field of `found` that `family` has otherwise."""
    theirs = dict(_fields(expected))
    for name, value in _fields(found):
        if name not in theirs or not _equal(value, theirs[name]):
            raise ValueError(
                f"{name} must be {theirs.get(name)!r} in the published family that is "
                f"nearest, {family}, got {value!r}"
            )


def _equal(a: Any, b: Any) -> bool:
    if type(a) is float and type(b) is float:
        # Scales are written as quotients of others.
        return math.isclose(a, b, rel_tol=1e-9)
    return a == b


def _fields(config: ModelConfig) -> Iterator[tuple[str, Any]]:
    """Names and values of what decides logits, defaults filled in."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in _WITHOUT_EFFECT | _BY_LAYER:
            continue
        if isinstance(value, Architecture):
            value = _architecture(config)
        yield from _flat(field.name, value)
    yield "architecture.norm_last", config.architecture.norm_last
    for i, mechanism in enumerate(config.layers):
        yield from _flat(f"layers[{i}]", mechanism)
        style = config.style(i)
        width = style.hidden_dim or config.hidden_dim
        if style.feed_forward == "none":
            width = None
        yield from _flat(f"styles[{i}]", dataclasses.replace(style, hidden_dim=width))


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        yield name, value
        return
    if hasattr(value, "build"):
        yield name, type(value).__name__
        value = _completed(value)
    for field in dataclasses.fields(value):
        if field.name not in _WITHOUT_EFFECT:
            yield from _flat(f"{name}.{field.name}", getattr(value, field.name))


def _architecture(config: ModelConfig) -> Architecture:
    """Without what each layer's style says, and what has no effect."""
    found = config.architecture
    default = {name: getattr(Architecture(), name) for name in _OF_STYLES}
    scaled = found.scale_embedding and config.tied_head
    return dataclasses.replace(found, **default, scale_embedding=scaled)


def _completed(mechanism: Any) -> Any:
    """The mechanism with values for None, where one is the default."""
    if isinstance(mechanism, HeadsConfig):
        turned = mechanism.rope_dim or mechanism.head_dim
        normed = mechanism.qk_norm != "none"
        return dataclasses.replace(
            mechanism,
            query_scale=mechanism.query_scale or mechanism.head_dim**-0.5,
            rope_dim=mechanism.head_dim if mechanism.rope_theta is None else turned,
            qk_norm_epsilon=mechanism.qk_norm_epsilon if normed else 1e-6,
        )
    if isinstance(mechanism, RecurrentSizes):
        style = dataclasses.replace(mechanism.style, num_key_heads=mechanism.key_heads)
        normed = style.norm != "none"
        epsilon = mechanism.norm_epsilon if normed else 1e-6
        return dataclasses.replace(mechanism, style=style, norm_epsilon=epsilon)
    return mechanism


def experts_of(config: ModelConfig) -> ExpertsConfig | None:
    """The first mixture of experts; None without one."""
    styles = (config.style(i) for i in range(config.num_layers))
    return next((style.experts for style in styles if style.experts), None)


def attention_of(config: ModelConfig) -> HeadsConfig:
    """Heads of the first attention layer; of one head where none attends."""
    found = [m.attention for m in config.mechanisms if m.attention is not None]
    # Files have the sizes of attention also where no layer attends.
    even = config.model_dim + config.model_dim % 2
    return found[0] if found else AttentionConfig(config.model_dim, 1, 1, even)
