"""Gated DeltaNet as flash-linear-attention saves it: reads and writes `config.json`.

Yang & Zhang, https://github.com/fla-org/flash-linear-attention. Some layers may attend,
as the record `attn` says.
"""

import math
from collections.abc import Mapping
from typing import Any

from memjax.checks import listed, short
from memjax.mechanisms import (
    AttentionConfig,
    GatedDeltaNetConfig,
    RecurrentStyle,
    SlidingWindowConfig,
)
from memjax.models.checkpoints.hf.fields import (
    first_slots,
    read_entry,
    read_layers,
    read_size,
    require_value,
)
from memjax.models.checkpoints.hf.hybrids.difference import attention_of
from memjax.models.checkpoints.hf.hybrids.entries import POSITIONS, memory_of
from memjax.models.checkpoints.hf.hybrids.layers import model_of_layers
from memjax.models.language_model.config import Dtype, ModelConfig

ATTENTION_KEYS = (
    *("layers", "num_heads", "num_kv_heads", "qkv_bias", "window_size"),
    "rope_theta",
)
# A feed-forward's width is a multiple of it.
MULTIPLE = 256


def from_gated_deltanet(config: Mapping[str, Any], dtype: Dtype) -> ModelConfig:
    """Gated DeltaNet, alone or with a few attention layers."""
    require_value(config, "hidden_act", "swish", default="swish")
    require_value(config, "use_short_conv", True, default=True)
    attends = read_entry(config, "attn", dict, {})
    among = read_entry(attends, "layers", list) if attends else []
    memory = _memory(config)
    attention = _attention(config, attends) if attends else memory
    return model_of_layers(
        config,
        [attention if i in among else memory for i in range(read_layers(config))],
        dtype,
        hidden=_hidden(config),
        epsilon=_epsilon(config),
    )


def _memory(config: Mapping[str, Any]) -> GatedDeltaNetConfig:
    heads, key_dim = (read_size(config, key) for key in ("num_heads", "head_dim"))
    expansion = read_entry(config, "expand_v", float, 2.0)
    value_dim = round(key_dim * expansion)
    if not math.isclose(value_dim, key_dim * expansion, rel_tol=1e-5):
        raise ValueError(
            f"expand_v must make a whole number of head_dim={key_dim}, got {expansion}"
        )
    gated = read_entry(config, "use_gate", bool, True)
    negative = read_entry(config, "allow_neg_eigval", bool, False)
    return GatedDeltaNetConfig(
        model_dim=read_size(config, "hidden_size"),
        num_heads=read_size(config, "num_v_heads", heads),
        key_dim=key_dim,
        value_dim=value_dim,
        norm_epsilon=_epsilon(config),
        max_rate=2.0 if negative else 1.0,
        style=RecurrentStyle(
            num_key_heads=heads,
            conv_width=read_size(config, "conv_size", 4),
            conv_value=True,
            query_scale=key_dim**-0.5,
            gate="silu" if gated else "none",
        ),
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


def _epsilon(config: Mapping[str, Any]) -> float:
    return read_entry(config, "norm_eps", float, 1e-6)


def _hidden(config: Mapping[str, Any]) -> int:
    """Width of the feed-forward: given, or two thirds of a ratio, rounded up."""
    if config.get("intermediate_size") is not None:
        return read_size(config, "intermediate_size")
    ratio = read_size(config, "hidden_ratio", 4)
    width = int(read_size(config, "hidden_size") * ratio * 2 / 3)
    return -(-width // MULTIPLE) * MULTIPLE


def to_gated_deltanet(config: ModelConfig) -> dict[str, Any]:
    """The entries of `from_gated_deltanet`."""
    memory, heads = memory_of(config, "gated_deltanet"), attention_of(config)
    among = [i for i, m in enumerate(config.layers) if m.attention is not None]
    found = {
        "num_heads": memory.key_heads,
        "num_v_heads": memory.num_heads,
        "head_dim": memory.key_dim,
        "expand_v": memory.value_dim / memory.key_dim,
        "use_gate": memory.style.gate != "none",
        "use_short_conv": True,
        "allow_neg_eigval": memory.max_rate > 1,
        "conv_size": memory.style.conv_width,
        "intermediate_size": config.hidden_dim,
        "hidden_act": "swish",
        "norm_eps": config.norm_epsilon,
        "max_position_embeddings": config.capacity or POSITIONS,
        "attn": None,
    }
    if among:
        (window, *_) = (m.tokens_per_call for m in config.layers if m.attention)
        found["attn"] = {
            "layers": among,
            "num_heads": heads.num_heads,
            "num_kv_heads": heads.num_kv_heads,
            "qkv_bias": heads.qkv_bias,
            "window_size": window,
            "rope_theta": heads.rope_theta,
        }
    return found
