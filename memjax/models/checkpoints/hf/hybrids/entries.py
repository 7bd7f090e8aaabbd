"""Entries of `config.json` that families share, as they are written."""

from typing import Any

from memjax.mechanisms.layers.heads import HeadsConfig
from memjax.models.checkpoints.hf.fields import rope_scaling_record, truncated_ratio
from memjax.models.checkpoints.hf.hybrids.difference import attention_of
from memjax.models.language_model.config import ModelConfig

#: max_position_embeddings of a model without a limit: Mistral's.
POSITIONS = 32_768


def decoder(config: ModelConfig, norm: str = "rms_norm_eps") -> dict[str, Any]:
    """The entries of all families that may attend; `norm` is the key of ε."""
    heads = attention_of(config)
    # Without RoPE the length of its training texts is no bound.
    length = getattr(heads, "capacity", None) or config.capacity
    found = {
        "intermediate_size": config.hidden_dim,
        "num_attention_heads": heads.num_heads,
        "num_key_value_heads": heads.num_kv_heads,
        "attention_bias": heads.qkv_bias,
        "max_position_embeddings": length or POSITIONS,
        norm: config.norm_epsilon,
        "rope_parameters": _rope(heads),
    }
    if heads.head_dim * heads.num_heads != config.model_dim:
        found["head_dim"] = heads.head_dim
    return found


def _rope(heads: HeadsConfig) -> dict[str, Any]:
    """The record of θ, scaling and the part of a head."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": heads.rope_theta}
    if heads.rope_dim is not None:
        found["partial_rotary_factor"] = truncated_ratio(heads.rope_dim, heads.head_dim)
    return found | (rope_scaling_record(heads.rope_scaling) or {})


def multiple_of_model(config: ModelConfig, name: str, width: int) -> int:
    """How many times the model's width some channels are.

    Raises:
        ValueError: if they are not a whole multiple.
    """
    if width % config.model_dim:
        raise ValueError(
            f"{name} must be a multiple of model_dim={config.model_dim} in "
            f"transformers, got {width}"
        )
    return width // config.model_dim


def memory_of(config: ModelConfig, name: str) -> Any:
    """The first layer of a mechanism, which `hybrid_family` found."""
    return next(m for m in config.mechanisms if m.name == name)
