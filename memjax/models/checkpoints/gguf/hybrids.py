"""Reads the `config.json` of models with recurrent layers from a GGUF file's metadata.

Entries that begin with ssm. are of their recurrent layers: `time_step_rank` counts
heads of values, `group_count` those of keys, `state_size` is the width of a key, and
`inner_size` that of all values together.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from memjax.models.checkpoints.gguf.architectures import THETA
from memjax.models.checkpoints.gguf.entries import Entries
from memjax.models.checkpoints.gguf.rope import rope_scaling
from memjax.models.checkpoints.hf.hybrids.config import FULL, LINEAR

logger = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]
# What llama.cpp takes where there is no entry.
INTERVAL = 4


class Recurrent(NamedTuple):
    """Sizes of a recurrent layer: `heads` of values, `groups` of keys."""

    heads: int
    groups: int
    key_dim: int
    value_dim: int
    taps: int


def read_recurrent(entry: Entries) -> Recurrent:
    """Sizes of recurrent layers; ValueError where heads cannot be told apart."""
    heads, groups = entry("ssm.time_step_rank"), entry("ssm.group_count")
    inner = entry("ssm.inner_size")
    if heads % groups:
        raise entry.error(
            "ssm.group_count", f"must divide ssm.time_step_rank={heads}", groups
        )
    if inner % heads:
        raise entry.error(
            "ssm.time_step_rank", f"must divide ssm.inner_size={inner}", heads
        )
    return Recurrent(
        heads, groups, entry("ssm.state_size"), inner // heads, entry("ssm.conv_kernel")
    )


def read_layers(entry: Entries) -> int:
    """The number of layers, without the last ones that predict further tokens."""
    layers, key = entry("block_count"), "nextn_predict_layers"
    extra = entry(key) if entry.find(key, 0) != 0 else 0
    if extra >= layers:
        raise entry.error(key, f"must be below block_count={layers}", extra)
    return layers - extra


def _qwen35(entry: Entries, shapes: Shapes) -> dict[str, Any]:
    """Gated DeltaNet with attention whose RoPE turns a part of a head."""
    sizes, layers = read_recurrent(entry), read_layers(entry)
    found = _attention(entry, shapes)
    return {
        **found,
        **_positions(entry, found, theta=None),
        "num_hidden_layers": layers,
        "num_key_value_heads": entry(
            "attention.head_count_kv", found["num_attention_heads"]
        ),
        "partial_rotary_factor": entry("rope.dimension_count") / found["head_dim"],
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
        "use_conv_bias": _has(shapes, "conv1d.bias"),
    }


def _granite(entry: Entries, shapes: Shapes) -> dict[str, Any]:
    """Mamba-2 with a few attention layers, without RoPE and by multipliers."""
    found, attends = _few_attending(entry, shapes)
    scale = found["head_dim"] ** -0.5
    layers = range(found["num_hidden_layers"])
    return {
        **found,
        "layer_types": [FULL if i in attends else LINEAR for i in layers],
        "shared_intermediate_size": found["intermediate_size"],
        "position_embedding_type": "nope",
        "attention_multiplier": entry.multiplier("attention.scale", scale),
        "embedding_multiplier": entry.multiplier("embedding_scale"),
        "residual_multiplier": entry.multiplier("residual_scale"),
        "logits_scaling": entry.multiplier("logit_scale"),
    }


def _bamba(entry: Entries, shapes: Shapes) -> dict[str, Any]:
    """Mamba-2 with a few attention layers, whose RoPE turns half of a head."""
    found, attends = _few_attending(entry, shapes)
    half, key = found["head_dim"] // 2, "rope.dimension_count"
    if (turned := entry(key, found["head_dim"])) != half:
        raise entry.error(key, f"must be {half}, half of a head", turned)
    entry.require("attention.scale", 0)
    for key in ("embedding_scale", "residual_scale", "logit_scale"):
        if entry.multiplier(key) != 1:
            raise entry.error(key, "must be 1 with RoPE", entry.find(key))
    return {**found, **_positions(entry, found, THETA), "attn_layer_indices": attends}


def _falcon_h1(entry: Entries, shapes: Shapes) -> dict[str, Any]:
    """Attention and Mamba-2 side by side; the weights have all multipliers in them."""
    found = _attention(entry, shapes) | _mamba(entry, shapes)
    entry.require("rope.dimension_count", found["head_dim"])
    if "lm_head.weight" not in shapes:
        logger.warning(
            "%s: the head is the embedding, with the embedding's multiplier in it: "
            "logits are those of llama.cpp, which may be a multiple of the original's",
            entry.file.path,
        )
    return {
        **found,
        **_positions(entry, found, theta=None),
        "num_key_value_heads": entry(
            "attention.head_count_kv", found["num_attention_heads"]
        ),
        "mamba_d_ssm": entry("ssm.inner_size"),
        "mamba_rms_norm": _has(shapes, "mamba.norm.weight"),
        # As llama.cpp computes it; the file does not say.
        "mamba_norm_before_gate": False,
    }


#: By Hugging Face's model_type.
READ: dict[str, Callable[[Entries, Shapes], dict[str, Any]]] = {
    "qwen3_5_text": _qwen35,
    "mamba2": _mamba2,
    "granitemoehybrid": _granite,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
}


def _attention(entry: Entries, shapes: Shapes) -> dict[str, Any]:
    """Sizes that all models with attention have, but for heads of keys and RoPE."""
    width, heads = entry("embedding_length"), entry("attention.head_count")
    head_dim = entry("attention.key_length", width // heads)
    entry.require("attention.value_length", head_dim)
    entry.require("attention.sliding_window", 0)
    return {
        "hidden_size": width,
        "intermediate_size": entry("feed_forward_length"),
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "max_position_embeddings": entry("context_length"),
        "rms_norm_eps": entry.real("attention.layer_norm_rms_epsilon"),
        "attention_bias": _has(shapes, "q_proj.bias"),
    }


def _positions(
    entry: Entries, found: Mapping[str, Any], theta: float | None
) -> dict[str, Any]:
    """RoPE's base and scaling; `theta` where the file does not say."""
    rope = {"rope_theta": entry.real("rope.freq_base", theta)}
    scaling = rope_scaling(entry, {**found, **rope})
    return rope | ({"rope_scaling": scaling} if scaling else {})


def _mamba(entry: Entries, shapes: Shapes) -> dict[str, Any]:
    """Sizes of Mamba-2 in a model that attends too."""
    sizes = read_recurrent(entry)
    return {
        "num_hidden_layers": entry("block_count"),
        "mamba_n_heads": sizes.heads,
        "mamba_d_head": sizes.value_dim,
        "mamba_n_groups": sizes.groups,
        "mamba_d_state": sizes.key_dim,
        "mamba_d_conv": sizes.taps,
        "mamba_conv_bias": _has(shapes, "conv1d.bias"),
    }


def _few_attending(entry: Entries, shapes: Shapes) -> tuple[dict[str, Any], list[int]]:
    """Sizes, and the layers that attend: those that have heads of keys."""
    found = _attention(entry, shapes) | _mamba(entry, shapes)
    entry.require("expert_shared_feed_forward_length", found["intermediate_size"])
    inner, width = entry("ssm.inner_size"), found["hidden_size"]
    if inner % width:
        raise entry.error(
            "ssm.inner_size", f"must be a multiple of embedding_length={width}", inner
        )
    key, layers = "attention.head_count_kv", found["num_hidden_layers"]
    heads = entry.by_layer(key, int, layers)
    counts = set(heads) - {0}
    if len(counts) > 1 or any(count < 0 for count in counts):
        raise entry.error(key, "must be 0 or the same number in each layer", heads)
    found["num_key_value_heads"] = max(counts, default=found["num_attention_heads"])
    found["mamba_expand"] = inner // width
    return found, [layer for layer in range(layers) if heads[layer]]


def _has(shapes: Shapes, suffix: str) -> bool:
    """Whether any tensor's name ends so."""
    return any(name.endswith(suffix) for name in shapes)
