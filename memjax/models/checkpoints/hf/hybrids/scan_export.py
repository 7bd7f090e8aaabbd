"""Writes `config.json` of models with a convolution or an elementwise scan.

The inverse of `scans`.
"""

from typing import Any

from memjax.models.checkpoints.hf.hybrids.difference import attention_of
from memjax.models.checkpoints.hf.hybrids.entries import (
    decoder,
    memory_of,
    multiple_of_model,
)
from memjax.models.checkpoints.hf.hybrids.layers import FULL
from memjax.models.checkpoints.hf.hybrids.scans import CONV, GELU
from memjax.models.language_model.config import ModelConfig


def to_lfm2(config: ModelConfig) -> dict[str, Any]:
    """The entries of LFM2."""
    kinds = [CONV if m.attention is None else FULL for m in config.layers]
    return decoder(config, norm="norm_eps") | {
        "layer_types": kinds,
        "conv_L_cache": memory_of(config, "short_conv").conv_width,
        "conv_bias": False,
        # The width as it is.
        "block_auto_adjust_ff_dim": False,
    }


def to_mamba(config: ModelConfig) -> dict[str, Any]:
    """The entries of Mamba, and of Falcon Mamba where it has norms."""
    memory = memory_of(config, "mamba")
    found = {
        "expand": multiple_of_model(config, "inner_dim", memory.inner_dim),
        "state_size": memory.state_dim,
        "time_step_rank": memory.dt_rank,
        "conv_kernel": memory.conv_width,
        "use_conv_bias": memory.conv_bias,
        "use_bias": memory.bias,
        "layer_norm_epsilon": config.norm_epsilon,
    }
    if memory.norm_epsilon is not None:
        found["mixer_rms_eps"] = memory.norm_epsilon
    return found


def to_recurrent_gemma(config: ModelConfig) -> dict[str, Any]:
    """The entries of RecurrentGemma."""
    memory, heads = memory_of(config, "rg_lru"), attention_of(config)
    windows = [m.tokens_per_call for m in config.mechanisms if m.attention]
    kinds = ["recurrent" if m.attention is None else "attention" for m in config.layers]
    found = decoder(config) | {
        "block_types": kinds,
        "lru_width": memory.width,
        "conv1d_width": memory.conv_width,
        "intermediate_size": 2 * config.hidden_dim,
        "hidden_activation": GELU,
        "logits_soft_cap": config.architecture.logits_cap,
    }
    if windows:
        found["attention_window_size"] = windows[0]
    else:
        found["num_attention_heads"] = memory.num_blocks
    if heads.num_heads != memory.num_blocks and windows:
        raise ValueError(
            f"num_blocks must be num_heads={heads.num_heads} in recurrent_gemma, got "
            f"{memory.num_blocks}"
        )
    for key in ("hidden_act", "max_position_embeddings"):
        found.pop(key, None)
    return found
