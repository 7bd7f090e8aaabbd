"""The entries of a GGUF file that keys of `config.json` are made from, for messages."""

import re
from collections.abc import Mapping
from typing import Any

#: Where a key has the entry's value, or is computed from it.
ENTRIES = {
    "attention_multiplier": "attention.scale",
    "conv_L_cache": "shortconv.l_cache",
    "conv_kernel": "ssm.conv_kernel",
    "embedding_multiplier": "embedding_scale",
    "expand": "ssm.inner_size",
    "head_dim": "attention.key_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "logits_scaling": "logit_scale",
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_ssm": "ssm.inner_size",
    "mamba_d_state": "ssm.state_size",
    "mamba_expand": "ssm.inner_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_num_heads": "ssm.time_step_rank",
    "max_position_embeddings": "context_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_group": "expert_group_count",
    "n_groups": "ssm.group_count",
    "n_routed_experts": "expert_count",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "num_attention_heads": "attention.head_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "num_hidden_layers": "block_count",
    "num_key_value_heads": "attention.head_count_kv",
    "num_local_experts": "expert_count",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "partial_rotary_factor": "rope.dimension_count",
    "residual_multiplier": "residual_scale",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_local_base_freq": "rope.freq_base_swa",
    "rope_theta": "rope.freq_base",
    "routed_scaling_factor": "expert_weights_scale",
    "sliding_window": "attention.sliding_window",
    "ssm_state_size": "ssm.state_size",
    "state_size": "ssm.state_size",
    "time_step_rank": "ssm.time_step_rank",
    "topk_group": "expert_group_used_count",
}
#: Of a head's width.
QUOTIENT = ("embedding_length", "attention.head_count")


def entries_named(message: str, metadata: Mapping[str, Any]) -> str:
    """A message about a `config.json` with the names of the file's own entries.

    Keys that the file has no entry for stay as they are.
    """
    architecture = metadata["general.architecture"]

    def own(key):
        entry = f"{architecture}.{ENTRIES.get(key[0], '')}"
        return entry if entry in metadata else key[0]

    named = re.sub(r"\w+", own, message)
    keys = [f"{architecture}.{key}" for key in QUOTIENT]
    # It is their quotient where the file does not say it; a model that does not attend
    # has 0 such heads.
    if re.search(r"\bhead_dim\b", named) and metadata.get(keys[1]):
        named += f" (from {', '.join(f'{key}={metadata.get(key)}' for key in keys)})"
    return named
