"""The keys of `config.json` that our options are made from, for messages.

Options are checked where they are used, under their own names, which a file has not.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from memjax.checks import short

_EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "norm_eps", "mixer_rms_eps")
_KEY_HEADS = ("linear_num_key_heads", "n_groups", "mamba_n_groups", "num_heads")
_WIDTHS = ("hidden_ratio", "block_ffn_dim_multiplier", "expand_ratio", "block_ff_dim")
#: Those of all families: a file has a few of them.
KEYS: dict[str, tuple[str, ...]] = {
    "norm_epsilon": _EPSILONS,
    "qk_norm_epsilon": _EPSILONS,
    "capacity": ("max_position_embeddings",),
    "num_layers": ("num_hidden_layers",),
    "model_dim": ("hidden_size",),
    "hidden_dim": ("intermediate_size", "ffn_dim", *_WIDTHS, "hidden_size"),
    "inner_dim": ("expand", "hidden_size"),
    "state_dim": ("state_size",),
    "dt_rank": ("time_step_rank",),
    "num_heads": (
        *("num_attention_heads", "linear_num_value_heads", "num_v_heads"),
        *("mamba_n_heads", "mamba_num_heads", "num_heads"),
    ),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "num_key_heads": _KEY_HEADS,
    "key_dim": (
        *("linear_key_head_dim", "ssm_state_size", "state_size", "mamba_d_state"),
        *("head_dim", "hidden_size", "num_heads", "expand_k", "expand_ratio"),
    ),
    "value_dim": (
        *("linear_value_head_dim", "mamba_head_dim", "mamba_d_head", "head_dim"),
        *("hidden_size", "num_heads", "expand_v"),
    ),
    "window": ("sliding_window", "attention_window_size", "attn"),
    "conv_width": (
        *("linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv", "conv_size"),
        *("conv_L_cache", "conv1d_width"),
    ),
    "width": ("lru_width", "hidden_size"),
    "num_blocks": ("num_attention_heads",),
    "damping": ("gate_logit_normalizer",),
    # Where the file does not say it.
    "head_dim": ("num_attention_heads", "hidden_size"),
    # Of Gemma's windows.
    "rope_theta": ("rope_local_base_freq",),
    "logits_cap": ("logits_soft_cap",),
    "query_scale": (
        *("query_pre_attn_scalar", "attention_multiplier", "key_multiplier"),
        "attention_in_multiplier",
    ),
    "attention_multiplier": ("attention_in_multiplier", "attention_out_multiplier"),
    "memory_multiplier": ("ssm_out_multiplier",),
    # Keys that others decide with, where they are in the message alone.
    "mamba_d_head": ("mamba_d_ssm", "mamba_expand", "hidden_size"),
    "partial_rotary_factor": ("head_dim", "hidden_size", "num_attention_heads"),
    "layer_types": ("num_hidden_layers",),
}
#: Options that are the value of one of several keys.
_SAME = {"norm_epsilon", "qk_norm_epsilon", "num_heads", "num_key_heads"}


@contextmanager
def keys_named(config: Mapping[str, Any]) -> Iterator[None]:
    """Adds to a ValueError the file's entries that are not in its message.

    Args:
        config: content of a `config.json`.

    Raises:
        ValueError: that of the block, with the keys and values that the options of its
            message come from, and the place of a key that is in a record.
    """
    try:
        yield
    except ValueError as error:
        found = _entries(str(error), config)
        if not found or " is missing " in str(error):
            raise
        raise ValueError(f"{error} (from {', '.join(found)})") from error


def _entries(message: str, config: Mapping[str, Any]) -> list[str]:
    """The entries behind the words of a message, as key=value."""
    words = re.findall(r"\w+", message.partition(", got ")[0])
    found = {}
    for word in words:
        behind = {key: config.get(key) for key in KEYS.get(word, ())}
        if word in _SAME:
            said = {k: v for k, v in behind.items() if short(v) in message}
            behind = said or behind
        if word == "head_dim" and config.get(word) is not None:
            behind = {}
        for key, value in behind.items():
            if value is not None and key not in words:
                found[key] = value
        for key, record in config.items():
            if key not in words and isinstance(record, Mapping) and word in record:
                found[f"{key}.{word}"] = record[word]
    return [f"{key}={short(value)}" for key, value in found.items()]
