"""The family of published models that a model with recurrent layers is written as."""

from collections.abc import Mapping
from typing import Any

from memjax.models.language_model.config import ModelConfig


def hybrid_family(config: ModelConfig) -> str | None:
    """The family that a model with recurrent layers is written as; None without one."""
    kinds = {mechanism.name: mechanism for mechanism in config.mechanisms}
    if "parallel" in kinds:
        return "falcon_h1"
    if "mamba" in kinds:
        normed: Any = kinds["mamba"]
        return "mamba" if normed.norm_epsilon is None else "falcon_mamba"
    for name, family in (("short_conv", "lfm2"), ("rg_lru", "recurrent_gemma")):
        if name in kinds:
            return family
    if family := _of_fla(kinds):
        return family
    memories: list[Any] = [kinds[n] for n in ("gated_deltanet", "mamba2") if n in kinds]
    if len(memories) != 1 or not memories[0].style.conv_value:
        return None
    (memory,) = memories
    attends = [m.attention for m in config.mechanisms if m.attention]
    styles = [config.style(i) for i in range(config.num_layers)]
    if memory.name == "gated_deltanet":
        if any(style.experts for style in styles):
            return "qwen3_next"
        if any(heads.output_gate for heads in attends):
            return "qwen3_5_text"
        normed = any(heads.qk_norm == "width" for heads in attends)
        return "olmo_hybrid" if normed else "gated_deltanet"
    if any(style.feed_forward == "relu2" for style in styles):
        return "nemotron_h"
    if not attends and styles[0].feed_forward == "none":
        return "mamba2"
    return "bamba" if any(heads.rope_dim for heads in attends) else "granitemoehybrid"


def _of_fla(kinds: Mapping[str, Any]) -> str | None:
    """The family of flash-linear-attention whose layer is among some by name."""
    if "linear_attention" in kinds and kinds["linear_attention"].retention:
        return "retnet"
    if "deltanet" in kinds and kinds["deltanet"].style.conv_value:
        return "delta_net"
    for name in ("gsa", "gla"):
        if name in kinds and not kinds[name].style.conv_width:
            return "hgrn2" if getattr(kinds[name], "tied_keys", False) else name
    return None
