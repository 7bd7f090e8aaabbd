"""Reads the `config.json` of models with recurrent layers from a GGUF file's metadata.

Functions are by families. Keys are Hugging Face's.
"""

import logging
from collections.abc import Callable
from typing import Any

from memjax.models.checkpoints.gguf.architecture import THETA
from memjax.models.checkpoints.gguf.entries import Entries
from memjax.models.checkpoints.gguf.hybrids.mixtures import (
    granite_experts,
    nemotron_experts,
    qwen_experts,
)
from memjax.models.checkpoints.gguf.hybrids.sizes import (
    Shapes,
    has,
    read_attention,
    read_expansion,
    read_few_attending,
    read_hidden,
    read_layers,
    read_mamba,
    read_positions,
    read_recurrent,
    read_some_layers,
)
from memjax.models.checkpoints.hf.fields import truncated_ratio
from memjax.models.checkpoints.hf.hybrids.config import FULL, LINEAR

logger = logging.getLogger(__name__)

# What llama.cpp takes where there is no entry.
INTERVAL = 4


def _qwen35(entry: Entries, shapes: Shapes) -> dict[str, Any]:
    """Gated DeltaNet with attention whose RoPE turns a part of a head."""
    return _qwen_mixers(entry, shapes) | read_hidden(entry)


def _qwen_moe(entry: Entries, shapes: Shapes) -> dict[str, Any]:
    """The same with experts."""
    return _qwen_mixers(entry, shapes) | qwen_experts(entry)


def _qwen_mixers(entry: Entries, shapes: Shapes) -> dict[str, Any]:
    sizes, layers = read_recurrent(entry), read_layers(entry)
    found = read_attention(entry, shapes)
    return {
        **found,
        **read_positions(entry, found, theta=None),
        "num_hidden_layers": layers,
        "num_key_value_heads": entry(
            "attention.head_count_kv", found["num_attention_heads"]
        ),
        "partial_rotary_factor": truncated_ratio(
            entry("rope.dimension_count"), found["head_dim"]
        ),
        "layer_types": _recurrent_layers(entry, layers),
        "linear_num_value_heads": sizes.heads,
        "linear_num_key_heads": sizes.groups,
        "linear_key_head_dim": sizes.key_dim,
        "linear_value_head_dim": sizes.value_dim,
        "linear_conv_kernel_dim": sizes.taps,
    }


def _recurrent_layers(entry: Entries, layers: int) -> list[str]:
    """The kind of each layer: as an array says, or every n-th attends."""
    key = "attention.recurrent_layers"
    if key in entry:
        recurrent = entry.by_layer(key, bool, entry("block_count"))[:layers]
    else:
        interval = entry("full_attention_interval", INTERVAL)
        recurrent = [(i + 1) % interval != 0 for i in range(layers)]
    return [LINEAR if memory else FULL for memory in recurrent]


def _mamba2(entry: Entries, shapes: Shapes) -> dict[str, Any]:
    """Mamba-2 alone, without a feed-forward."""
    sizes = read_recurrent(entry)
    for key in ("feed_forward_length", "attention.head_count"):
        entry.require(key, 0)
    return {
        "hidden_size": entry("embedding_length"),
        "num_hidden_layers": entry("block_count"),
        "layer_norm_epsilon": entry.real("attention.layer_norm_rms_epsilon"),
        "num_heads": sizes.heads,
        "head_dim": sizes.value_dim,
        "state_size": sizes.key_dim,
        "n_groups": sizes.groups,
        "conv_kernel": sizes.taps,
        "use_conv_bias": has(shapes, "conv1d.bias"),
    }


def _granite(entry: Entries, shapes: Shapes) -> dict[str, Any]:
    """Mamba-2 with a few attention layers, without RoPE and by multipliers."""
    found, attends = read_few_attending(entry, shapes)
    scale, hidden = found["head_dim"] ** -0.5, found["intermediate_size"]
    if entry.find("expert_count", 0):
        experts = granite_experts(entry)
    else:
        entry.require("expert_shared_feed_forward_length", hidden)
        experts = {"shared_intermediate_size": hidden}
    layers = range(found["num_hidden_layers"])
    return {
        **found,
        **experts,
        "layer_types": [FULL if i in attends else LINEAR for i in layers],
        "position_embedding_type": "nope",
        "attention_multiplier": entry.multiplier("attention.scale", scale),
        "embedding_multiplier": entry.multiplier("embedding_scale"),
        "residual_multiplier": entry.multiplier("residual_scale"),
        "logits_scaling": entry.multiplier("logit_scale"),
    }


def _bamba(entry: Entries, shapes: Shapes) -> dict[str, Any]:
    """Mamba-2 with a few attention layers, whose RoPE turns half of a head."""
    found, attends = read_few_attending(entry, shapes)
    entry.require("expert_shared_feed_forward_length", found["intermediate_size"])
    half, key = found["head_dim"] // 2, "rope.dimension_count"
    if (turned := entry(key, found["head_dim"])) != half:
        raise entry.error(key, f"must be {half}, half of a head", turned)
    entry.require("attention.scale", 0)
    for key in ("embedding_scale", "residual_scale", "logit_scale"):
        if entry.multiplier(key) != 1:
            raise entry.error(key, "must be 1 with RoPE", entry.find(key))
    return {
        **found,
        **read_positions(entry, found, THETA),
        "attn_layer_indices": attends,
    }


def _falcon_h1(entry: Entries, shapes: Shapes) -> dict[str, Any]:
    """Attention and Mamba-2 side by side; the weights have all multipliers in them."""
    found = (
        read_attention(entry, shapes) | read_hidden(entry) | read_mamba(entry, shapes)
    )
    entry.require("rope.dimension_count", found["head_dim"])
    if "lm_head.weight" not in shapes:
        logger.warning(
            "%s: the head is the embedding, with the embedding's multiplier in it: "
            "logits are those of llama.cpp, which may be a multiple of the original's",
            entry.file.path,
        )
    return {
        **found,
        **read_positions(entry, found, theta=None),
        "num_key_value_heads": entry(
            "attention.head_count_kv", found["num_attention_heads"]
        ),
        "mamba_d_ssm": entry("ssm.inner_size"),
        "mamba_rms_norm": has(shapes, "mamba.norm.weight"),
        # As llama.cpp computes it; the file does not say.
        "mamba_norm_before_gate": False,
    }


def _nemotron_h(entry: Entries, shapes: Shapes) -> dict[str, Any]:
    """Layers of one branch: a memory, attention or a feed-forward."""
    found, sizes = read_attention(entry, shapes), read_recurrent(entry)
    epsilon = found.pop("rms_norm_eps")
    kv_heads, attends = read_some_layers(entry, "attention.head_count_kv")
    hidden, feeds = read_some_layers(entry, "feed_forward_length")
    if both := set(attends) & set(feeds):
        raise entry.error("feed_forward_length", "must be 0 where layers attend", both)
    moe = bool(entry.find("expert_count", 0))
    kinds = dict.fromkeys(attends, "*") | dict.fromkeys(feeds, "E" if moe else "-")
    layers = read_layers(entry)
    return {
        **found,
        **(nemotron_experts(entry) if moe else {}),
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads or found["num_attention_heads"],
        "intermediate_size": hidden,
        "layer_norm_epsilon": epsilon,
        "hybrid_override_pattern": "".join(kinds.get(i, "M") for i in range(layers)),
        "mamba_num_heads": sizes.heads,
        "mamba_head_dim": sizes.value_dim,
        "ssm_state_size": sizes.key_dim,
        "n_groups": sizes.groups,
        "conv_kernel": sizes.taps,
        "use_conv_bias": has(shapes, "conv1d.bias"),
    }


def _mamba1(entry: Entries, shapes: Shapes) -> dict[str, Any]:
    """Mamba alone, whose channels are heads, without a feed-forward."""
    for key in ("feed_forward_length", "attention.head_count"):
        entry.require(key, 0)
    return {
        "hidden_size": entry("embedding_length"),
        "num_hidden_layers": entry("block_count"),
        "layer_norm_epsilon": entry.real("attention.layer_norm_rms_epsilon"),
        "expand": read_expansion(entry),
        "state_size": entry("ssm.state_size"),
        "conv_kernel": entry("ssm.conv_kernel"),
        "time_step_rank": entry("ssm.time_step_rank"),
        "use_conv_bias": has(shapes, "conv1d.bias"),
        "use_bias": has(shapes, "in_proj.bias"),
    }


def _lfm2(entry: Entries, shapes: Shapes) -> dict[str, Any]:
    """Short convolutions with a few attention layers."""
    found = read_attention(entry, shapes) | read_hidden(entry)
    epsilon, layers = found.pop("rms_norm_eps"), entry("block_count")
    entry.require("rope.dimension_count", found["head_dim"])
    heads, attends = read_some_layers(entry, "attention.head_count_kv")
    return {
        **found,
        **read_positions(entry, found, theta=None),
        "num_hidden_layers": layers,
        "num_key_value_heads": heads or found["num_attention_heads"],
        "norm_eps": epsilon,
        "conv_L_cache": entry("shortconv.l_cache"),
        "layer_types": [FULL if i in attends else "conv" for i in range(layers)],
        # The width is that of the matrices.
        "block_auto_adjust_ff_dim": False,
    }


#: By Hugging Face's model_type.
READ: dict[str, Callable[[Entries, Shapes], dict[str, Any]]] = {
    "qwen3_5_text": _qwen35,
    "qwen3_5_moe_text": _qwen_moe,
    "qwen3_next": _qwen_moe,
    "mamba": _mamba1,
    "falcon_mamba": _mamba1,
    "mamba2": _mamba2,
    "lfm2": _lfm2,
    "granitemoehybrid": _granite,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
}
