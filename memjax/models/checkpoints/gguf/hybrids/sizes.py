"""Sizes that models with recurrent layers share, from a GGUF file's metadata.

Entries that begin with ssm. are of their recurrent layers: `time_step_rank` counts
heads of values, `group_count` those of keys, `state_size` is the width of a key, and
`inner_size` that of all values together.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from memjax.models.checkpoints.gguf.entries import Entries
from memjax.models.checkpoints.gguf.rope import rope_scaling

Shapes = Mapping[str, tuple[int, ...]]


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


def read_attention(entry: Entries, shapes: Shapes) -> dict[str, Any]:
    """Sizes that all models with attention have, but for heads of keys and RoPE."""
    width, heads = entry("embedding_length"), entry("attention.head_count")
    head_dim = entry("attention.key_length", width // heads)
    entry.require("attention.value_length", head_dim)
    entry.require("attention.sliding_window", 0)
    return {
        "hidden_size": width,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "max_position_embeddings": entry("context_length"),
        "rms_norm_eps": entry.real("attention.layer_norm_rms_epsilon"),
        "attention_bias": has(shapes, "q_proj.bias"),
    }


def read_hidden(entry: Entries) -> dict[str, Any]:
    """The width of feed-forwards."""
    return {"intermediate_size": entry("feed_forward_length")}


def read_positions(
    entry: Entries, found: Mapping[str, Any], theta: float | None
) -> dict[str, Any]:
    """RoPE's base and scaling; `theta` where the file does not say."""
    rope = {"rope_theta": entry.real("rope.freq_base", theta)}
    scaling = rope_scaling(entry, {**found, **rope})
    return rope | ({"rope_scaling": scaling} if scaling else {})


def read_mamba(entry: Entries, shapes: Shapes) -> dict[str, Any]:
    """Sizes of Mamba-2 in a model that attends too."""
    sizes = read_recurrent(entry)
    return {
        "num_hidden_layers": entry("block_count"),
        "mamba_n_heads": sizes.heads,
        "mamba_d_head": sizes.value_dim,
        "mamba_n_groups": sizes.groups,
        "mamba_d_state": sizes.key_dim,
        "mamba_d_conv": sizes.taps,
        "mamba_conv_bias": has(shapes, "conv1d.bias"),
    }


def read_few_attending(
    entry: Entries, shapes: Shapes
) -> tuple[dict[str, Any], list[int]]:
    """Sizes, and the layers that attend: those that have heads of keys."""
    found = (
        read_attention(entry, shapes) | read_hidden(entry) | read_mamba(entry, shapes)
    )
    heads, attends = read_some_layers(entry, "attention.head_count_kv")
    found["num_key_value_heads"] = heads or found["num_attention_heads"]
    found["mamba_expand"] = read_expansion(entry)
    return found, attends


def read_expansion(entry: Entries) -> int:
    """How many times wider the values are than the model."""
    inner, width = entry("ssm.inner_size"), entry("embedding_length")
    if inner % width:
        raise entry.error(
            "ssm.inner_size", f"must be a multiple of embedding_length={width}", inner
        )
    return inner // width


def read_some_layers(entry: Entries, key: str) -> tuple[int, list[int]]:
    """A size that some layers have and others do not, and those that have it."""
    sizes = entry.by_layer(key, int, entry("block_count"))[: read_layers(entry)]
    found = set(sizes) - {0}
    if len(found) > 1 or any(size < 0 for size in found):
        raise entry.error(key, "must be 0 or the same number in each layer", sizes)
    return max(found, default=0), [i for i, size in enumerate(sizes) if size]


def has(shapes: Shapes, suffix: str) -> bool:
    """Whether any tensor's name ends so."""
    return any(name.endswith(suffix) for name in shapes)
