"""Reads entries of a `config.json`, each checked, and what it says about RoPE."""

import math
from collections.abc import Mapping
from typing import Any

from memjax.checks import check_positive, check_sizes, short
from memjax.mechanisms.layers.rope import RopeScaling

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
MAX_LAYERS = 1024
#: Of a number in a file, which is used in float32.
LARGEST = 1e38
# Tokens that a new cache has room for; longer texts make it grow.
FIRST_SLOTS = 2048


def read_rope(
    config: Mapping[str, Any],
    capacity: int,
    theta: float = 10_000.0,
    *,
    partial: bool = False,
) -> tuple[float, RopeScaling | None]:
    """θ and scaling, in one record in transformers 5 and in two places in 4.

    `theta` is the default; `capacity` for the original length. A part of a head is for
    `read_rope_dim`, where it may be turned alone (`partial`).
    """
    key, rope = _rope_record(config)
    theta = read_entry(rope, "rope_theta", float, theta)
    if not partial:
        require_value(rope, "partial_rotary_factor", 1.0, default=1.0)
    kind = read_entry(rope, "rope_type", str, read_entry(rope, "type", str, "default"))
    if kind not in ROPE_TYPES:
        raise ValueError(
            f"rope_type must be one of {ROPE_TYPES}, got {short(kind)} in {key}"
        )
    if kind == "default":
        return theta, None
    original = read_size(rope, "original_max_position_embeddings", capacity)
    original = read_size(config, "original_max_position_embeddings", original)
    stretched = capacity / original if kind == "yarn" else None
    factor = read_entry(rope, "factor", float, stretched)
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            factor,
            low_frequency_factor=read_entry(rope, "low_freq_factor", float),
            high_frequency_factor=read_entry(rope, "high_freq_factor", float),
            original_positions=original,
        )
    require_value(rope, "truncate", True, default=True)
    return theta, RopeScaling(
        "yarn",
        factor,
        original_positions=original,
        beta_fast=read_entry(rope, "beta_fast", float, 32.0),
        beta_slow=read_entry(rope, "beta_slow", float, 1.0),
        attention_factor=_read_attention_factor(rope, factor),
    )


def _rope_record(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """RoPE's entries in a file, and the key of their record."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    return key, {
        "rope_theta": config.get("rope_theta"),
        "partial_rotary_factor": config.get("partial_rotary_factor"),
    } | read_entry(config, key, dict, {})


def rope_scaling_record(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """The record of a scaling, from which `read_rope` reads it."""
    if scaling is None:
        return None
    record: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        record["original_max_position_embeddings"] = scaling.original_positions
    if scaling.kind == "llama3":
        record["low_freq_factor"] = scaling.low_frequency_factor
        record["high_freq_factor"] = scaling.high_frequency_factor
    elif scaling.kind == "yarn":
        record["beta_fast"] = scaling.beta_fast
        record["beta_slow"] = scaling.beta_slow
        if scaling.attention_factor is not None:
            record["attention_factor"] = scaling.attention_factor
    return record


def read_rope_dim(config: Mapping[str, Any], width: int, default: float) -> int:
    """Channels of a head of `width` that RoPE turns."""
    factor = read_entry(
        _rope_record(config)[1], "partial_rotary_factor", float, default
    )
    turned = int(width * factor)
    if not 0 < factor <= 1 or turned % 2 or not turned:
        raise ValueError(
            "partial_rotary_factor must be in (0, 1] and turn an even number of "
            f"{width} channels, got {factor}"
        )
    return turned


def truncated_ratio(part: int, width: int) -> float:
    """The ratio of `part` to `width`, for readers that truncate its product."""
    ratio = part / width
    return ratio if int(width * ratio) == part else math.nextafter(ratio, math.inf)


def first_slots(capacity: int) -> int | None:
    """Slots of an empty cache; None is all."""
    return FIRST_SLOTS if capacity > FIRST_SLOTS else None


def _read_attention_factor(rope: Mapping[str, Any], factor: float) -> float | None:
    """YaRN's attention factor, given directly or as DeepSeek's quotient of two."""
    given = read_entry(rope, "attention_factor", float, 0.0)
    above = read_entry(rope, "mscale", float, 0.0)
    below = read_entry(rope, "mscale_all_dim", float, 0.0)
    if given:
        return given
    # `RopeScaling` refuses such a factor.
    if not (above and below) or not factor >= 1:
        return None
    check_positive(mscale=above, mscale_all_dim=below)

    def part(scale):
        return 0.1 * scale * math.log(factor) + 1.0

    return part(above) / part(below)


def read_heads(config: Mapping[str, Any]) -> int:
    """The number of query heads, which divides the width if nothing else is said."""
    heads, width = (
        read_size(config, "num_attention_heads"),
        read_size(config, "hidden_size"),
    )
    if width % heads and not config.get("head_dim"):
        raise ValueError(
            f"num_attention_heads must divide hidden_size={width}, got {heads}"
        )
    return heads


def read_layers(config: Mapping[str, Any]) -> int:
    """The number of layers."""
    layers = read_size(config, "num_hidden_layers")
    # A malformed file must not make the caller build millions of layers.
    if layers > MAX_LAYERS:
        raise ValueError(
            f"num_hidden_layers must be at most {MAX_LAYERS}, got {layers}"
        )
    return layers


def read_size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """An integer in [1, 2**31); the default is not checked."""
    size = read_entry(config, key, int, default)
    if config.get(key) is not None:
        check_sizes(**{key: size})
    return size


def read_entry(
    config: Mapping[str, Any], key: str, kind: type, default: Any = None
) -> Any:
    """A value, checked for its type; the default, if not None, where it is null."""
    value = config.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"{key} is missing from config.json")
        return default
    is_number = kind is float and type(value) in (int, float)
    if not is_number and type(value) is not kind:
        raise ValueError(f"{key} must be of type {kind.__name__}, got {short(value)}")
    # NaN is in no range; a large integer is no float.
    if is_number and not abs(value) <= LARGEST:
        raise ValueError(f"{key} must be at most {LARGEST:g}, got {short(value)}")
    return float(value) if is_number else value


def require_value(
    config: Mapping[str, Any], key: str, allowed: Any, default: Any
) -> None:
    """Raises ValueError unless a value is the only supported one."""
    value = read_entry(config, key, type(allowed), default)
    if value != allowed:
        raise ValueError(f"{key} must be {allowed!r}, got {short(value)}")
