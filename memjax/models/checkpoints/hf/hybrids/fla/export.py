"""Writes `config.json` of models as flash-linear-attention has them; see `layers`."""

from collections.abc import Callable
from typing import Any

from memjax.models.checkpoints.hf.fields import truncated_ratio
from memjax.models.checkpoints.hf.hybrids.difference import attention_of
from memjax.models.checkpoints.hf.hybrids.entries import POSITIONS, memory_of
from memjax.models.language_model.config import ModelConfig


def to_gated_deltanet(config: ModelConfig) -> dict[str, Any]:
    """The entries of Gated DeltaNet."""
    memory = memory_of(config, "gated_deltanet")
    return (
        _block(config)
        | _delta_rule(memory)
        | {
            "num_heads": memory.key_heads,
            "num_v_heads": memory.num_heads,
            "head_dim": memory.key_dim,
            "expand_v": memory.value_dim / memory.key_dim,
        }
    )


def to_delta_net(config: ModelConfig) -> dict[str, Any]:
    """The entries of DeltaNet."""
    memory = memory_of(config, "deltanet")
    fixed = {"use_beta": True, "qk_norm": "l2", "qk_activation": "silu"}
    return _block(config) | _widths(memory) | _delta_rule(memory) | fixed


def to_gla(config: ModelConfig) -> dict[str, Any]:
    """The entries of gated linear attention."""
    return _block(config) | _widths(memory_of(config, "gla")) | _PLAIN


def to_retnet(config: ModelConfig) -> dict[str, Any]:
    """The entries of RetNet."""
    return _block(config) | _widths(memory_of(config, "linear_attention")) | _PLAIN


def to_gsa(config: ModelConfig) -> dict[str, Any]:
    """The entries of gated slot attention."""
    memory = memory_of(config, "gsa")
    return (
        _block(config)
        | _widths(memory)
        | {
            "num_slots": memory.slots,
            "gate_logit_normalizer": memory.damping,
            "feature_map": "swish",
            "use_short_conv": False,
        }
    )


def to_hgrn2(config: ModelConfig) -> dict[str, Any]:
    """The entries of HGRN2."""
    memories: list[Any] = [m for m in config.layers if m.name == "gla"]
    return _block(config) | {
        "num_heads": memories[0].num_heads,
        "expand_ratio": memories[0].key_dim,
        "use_lower_bound": any(memory.lower_bound for memory in memories),
        "use_short_conv": False,
    }


_PLAIN = {
    "use_short_conv": False,
    "use_output_gate": True,
    "fuse_norm": True,
    "feature_map": None,
}


def _block(config: ModelConfig) -> dict[str, Any]:
    """The entries of all families, and of their attention layers."""
    heads = attention_of(config)
    among = [i for i, m in enumerate(config.layers) if m.attention is not None]
    found = {
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


def _widths(memory: Any) -> dict[str, Any]:
    """Heads, and the model's width times which their keys and values have."""
    heads, width = memory.num_heads, memory.model_dim
    return {
        "num_heads": heads,
        "expand_k": truncated_ratio(heads * memory.key_dim, width),
        "expand_v": truncated_ratio(heads * memory.value_dim, width),
    }


def _delta_rule(memory: Any) -> dict[str, Any]:
    return {
        "use_gate": memory.style.gate != "none",
        "use_short_conv": True,
        "allow_neg_eigval": memory.max_rate > 1,
        "conv_size": memory.style.conv_width,
    }


#: By `model_type`: its writer, and its class in flash-linear-attention.
WRITE_FLA: dict[str, tuple[Callable[[ModelConfig], dict[str, Any]], str]] = {
    "gated_deltanet": (to_gated_deltanet, "GatedDeltaNetForCausalLM"),
    "delta_net": (to_delta_net, "DeltaNetForCausalLM"),
    "gla": (to_gla, "GLAForCausalLM"),
    "gsa": (to_gsa, "GSAForCausalLM"),
    "retnet": (to_retnet, "RetNetForCausalLM"),
    "hgrn2": (to_hgrn2, "HGRN2ForCausalLM"),
}
