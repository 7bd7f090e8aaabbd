"""Models as flash-linear-attention saves them: reads their `config.json`.

Yang & Zhang, https://github.com/fla-org/flash-linear-attention. All have one block
around a recurrent layer, and some layers may attend, as the record `attn` says.
"""

from collections.abc import Callable, Mapping
from typing import Any

from memjax.checks import listed, short
from memjax.mechanisms import AttentionConfig, RecurrentConfig, SlidingWindowConfig
from memjax.models.checkpoints.hf.fields import (
    first_slots,
    read_entry,
    read_layers,
    read_size,
    require_value,
)
from memjax.models.checkpoints.hf.hybrids.layers import model_of_layers
from memjax.models.language_model.config import Dtype, ModelConfig

ATTENTION_KEYS = (
    *("layers", "num_heads", "num_kv_heads", "qkv_bias", "window_size"),
    "rope_theta",
)
# A feed-forward's width is a multiple of it.
MULTIPLE = 256


def from_fla(
    read: Callable[[Mapping[str, Any], int], RecurrentConfig],
    config: Mapping[str, Any],
    dtype: Dtype,
    *,
    hidden_ratio: int = 4,
) -> ModelConfig:
    """Recurrent layers, alone or with a few attention layers.

    Args:
        read: the recurrent layer of a file and its number.
        config: of the file.
        dtype: of the activations.
        hidden_ratio: the family's default.
    """
    require_value(config, "hidden_act", "swish", default="swish")
    attends = read_entry(config, "attn", dict, {})
    if attends and not isinstance(attends.get("layers"), list):
        raise ValueError(f"attn.layers must be a list, got {short(attends)}")
    among = attends["layers"] if attends else []
    layers: list[Any] = [read(config, i) for i in range(read_layers(config))]
    if attends:
        attention = _attention(config, attends)
        layers = [attention if i in among else m for i, m in enumerate(layers)]
    return model_of_layers(
        config,
        layers,
        dtype,
        hidden=_hidden(config, hidden_ratio),
        epsilon=fla_epsilon(config),
    )


def _attention(
    config: Mapping[str, Any], attends: Mapping[str, Any]
) -> AttentionConfig | SlidingWindowConfig:
    """The attention of the layers that the record `attn` names."""
    if unknown := attends.keys() - {*ATTENTION_KEYS}:
        raise ValueError(
            f"attn must have no keys but {ATTENTION_KEYS}, got "
            f"{listed(sorted(unknown))}"
        )
    width, heads = read_size(config, "hidden_size"), read_size(attends, "num_heads")
    if width % heads:
        raise ValueError(
            f"attn.num_heads must divide hidden_size={width}, got {short(heads)}"
        )
    sizes: dict[str, Any] = {
        "model_dim": width,
        "num_heads": heads,
        "num_kv_heads": read_size(attends, "num_kv_heads", heads),
        "head_dim": width // heads,
        "qkv_bias": read_entry(attends, "qkv_bias", bool, False),
        "rope_theta": read_entry(attends, "rope_theta", float, 10_000.0),
    }
    if window := read_size(attends, "window_size", 0):
        return SlidingWindowConfig(**sizes, window=window)
    length = read_size(config, "max_position_embeddings", 2048)
    return AttentionConfig(**sizes, capacity=length, initial_slots=first_slots(length))


def fla_epsilon(config: Mapping[str, Any]) -> float:
    """Of the model's norms."""
    return read_entry(config, "norm_eps", float, 1e-6)


def _hidden(config: Mapping[str, Any], default: int) -> int:
    """Width of the feed-forward: given, or two thirds of a ratio, rounded up."""
    if config.get("intermediate_size") is not None:
        return read_size(config, "intermediate_size")
    ratio = read_size(config, "hidden_ratio", default)
    width = int(read_size(config, "hidden_size") * ratio * 2 / 3)
    return -(-width // MULTIPLE) * MULTIPLE
