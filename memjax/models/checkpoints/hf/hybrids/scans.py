"""Reads `config.json` of models with a convolution or an elementwise scan.

LFM2, Mamba, Falcon Mamba and RecurrentGemma.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from memjax.checks import short
from memjax.mechanisms import (
    MambaConfig,
    RGLRUConfig,
    ShortConvConfig,
    SlidingWindowConfig,
)
from memjax.models.checkpoints.hf.fields import (
    read_entry,
    read_heads,
    read_layers,
    read_rope,
    read_rope_dim,
    read_size,
    require_value,
)
from memjax.models.checkpoints.hf.hybrids.layers import (
    FULL,
    layer_kinds,
    model_of_layers,
)
from memjax.models.checkpoints.hf.hybrids.mixers import full_attention, require_silu
from memjax.models.language_model.config import Dtype, ModelConfig

CONV = "conv"
LFM2_THETA = 1e6
GELU = "gelu_pytorch_tanh"


def from_lfm2(config: Mapping[str, Any], dtype: Dtype) -> ModelConfig:
    """Gated convolutions of three taps, and a few attention layers."""
    require_value(config, "conv_bias", False, default=False)
    epsilon = read_entry(config, "norm_eps", float, 1e-5)
    attends = read_entry(
        config, "full_attn_idxs", list, list(range(read_layers(config)))
    )
    kinds = layer_kinds(config, lambda i: FULL if i in attends else CONV, (CONV, FULL))
    mechanisms = {
        FULL: full_attention(
            config,
            kv_heads=read_size(config, "num_key_value_heads"),
            theta=LFM2_THETA,
            qk_norm="head",
            qk_norm_epsilon=epsilon,
        ),
        CONV: ShortConvConfig(
            read_size(config, "hidden_size"), read_size(config, "conv_L_cache", 3)
        ),
    }
    model = model_of_layers(
        config,
        [mechanisms[kind] for kind in kinds],
        dtype,
        tied=True,
        hidden=_lfm2_hidden(config),
        epsilon=epsilon,
    )
    # A former name.
    tied = read_entry(config, "tie_embedding", bool, model.tied_head)
    return dataclasses.replace(model, tied_head=tied)


def _lfm2_hidden(config: Mapping[str, Any]) -> int:
    """Two thirds of the width that the file has, rounded up to a multiple."""
    width = read_size(config, "intermediate_size", 12_288)
    width = read_size(config, "block_ff_dim", width)
    if not read_entry(config, "block_auto_adjust_ff_dim", bool, True):
        return width
    factor = read_entry(config, "block_ffn_dim_multiplier", float, 1.0)
    multiple = read_size(config, "block_multiple_of", 256)
    return -int(factor * int(2 * width / 3)) // multiple * -multiple


def from_mamba(config: Mapping[str, Any], dtype: Dtype) -> ModelConfig:
    """Mamba alone, without a feed-forward."""
    return _from_mamba(config, dtype, None)


def from_falcon_mamba(config: Mapping[str, Any], dtype: Dtype) -> ModelConfig:
    """Mamba that divides Δ's input, b and c by their rms."""
    return _from_mamba(config, dtype, read_entry(config, "mixer_rms_eps", float, 1e-6))


def _from_mamba(
    config: Mapping[str, Any], dtype: Dtype, norm: float | None
) -> ModelConfig:
    require_silu(config)
    width = read_size(config, "hidden_size")
    automatic = config.get("time_step_rank", "auto") == "auto"
    memory = MambaConfig(
        model_dim=width,
        inner_dim=read_size(config, "expand", 2) * width,
        state_dim=read_size(config, "state_size", 16),
        dt_rank=-(-width // 16) if automatic else read_size(config, "time_step_rank"),
        conv_width=read_size(config, "conv_kernel", 4),
        conv_bias=read_entry(config, "use_conv_bias", bool, True),
        bias=read_entry(config, "use_bias", bool, False),
        norm_epsilon=norm,
    )
    return model_of_layers(
        config,
        [memory] * read_layers(config),
        dtype,
        tied=True,
        hidden=1,
        epsilon=read_entry(config, "layer_norm_epsilon", float, 1e-5),
        feed_forward="none",
    )


def from_recurrent_gemma(config: Mapping[str, Any], dtype: Dtype) -> ModelConfig:
    """RG-LRU two layers in three; the third attends within a window."""
    require_value(config, "hidden_activation", GELU, default=GELU)
    width, heads = read_size(config, "hidden_size"), read_heads(config)
    window = read_size(config, "attention_window_size", 2048)
    theta, scaling = read_rope(config, window, partial=True)
    attention = SlidingWindowConfig(
        model_dim=width,
        num_heads=heads,
        num_kv_heads=read_size(config, "num_key_value_heads", heads),
        head_dim=width // heads,
        rope_theta=theta,
        rope_scaling=scaling,
        rope_dim=read_rope_dim(config, width // heads, 0.5),
        qkv_bias=read_entry(config, "attention_bias", bool, False),
        output_bias=True,
        window=window,
    )
    memory = RGLRUConfig(
        model_dim=width,
        width=read_size(config, "lru_width", width),
        num_blocks=heads,
        conv_width=read_size(config, "conv1d_width", 4),
    )
    inner = read_size(config, "intermediate_size", 3 * 2560)
    if inner % 2:
        raise ValueError(f"intermediate_size must be even, got {inner}")
    mechanisms = {"recurrent": memory, "attention": attention}
    return model_of_layers(
        config,
        [mechanisms[kind] for kind in _block_types(config, tuple(mechanisms))],
        dtype,
        tied=True,
        hidden=inner // 2,
        feed_forward="geglu",
        feed_forward_bias=True,
        embedding_multiplier=embedding_scale(width),
        logits_cap=read_entry(config, "logits_soft_cap", float, 30.0),
    )


def embedding_scale(width: int) -> float:
    """The root of the width, as bfloat16 rounds it."""
    return float(jnp.asarray(width**0.5, jnp.bfloat16))


def _block_types(config: Mapping[str, Any], known: tuple[str, ...]) -> list[str]:
    """The kind of each layer, from those of a period."""
    default = ["recurrent", "recurrent", "attention"]
    given = read_entry(config, "block_types", list, default)
    for i, kind in enumerate(given):
        if kind not in known:
            raise ValueError(
                f"block_types[{i}] must be one of {known}, got {short(kind)}"
            )
    if not given:
        raise ValueError("block_types must name a layer, got []")
    return [given[i % len(given)] for i in range(read_layers(config))]
