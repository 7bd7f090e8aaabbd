"""Reads mixtures of experts from the metadata of a GGUF file."""

from typing import Any

from memjax.models.checkpoints.gguf.entries import Entries

# Values of expert_gating_func.
SOFTMAX, SIGMOID = 1, 2


def qwen_experts(entry: Entries) -> dict[str, Any]:
    """Softmax of all, the chosen divided by their sum, and a gated shared expert."""
    _require_router(entry, SOFTMAX)
    return {
        "num_experts": entry("expert_count"),
        "num_experts_per_tok": entry("expert_used_count"),
        "moe_intermediate_size": entry("expert_feed_forward_length"),
        "shared_expert_intermediate_size": entry("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
    }


def granite_experts(entry: Entries) -> dict[str, Any]:
    """Softmax of the chosen, and a shared expert."""
    _require_router(entry, SOFTMAX)
    entry.require("expert_feed_forward_length", entry("feed_forward_length"))
    return {
        "num_local_experts": entry("expert_count"),
        "num_experts_per_tok": entry("expert_used_count"),
        "shared_intermediate_size": entry("expert_shared_feed_forward_length"),
    }


def nemotron_experts(entry: Entries) -> dict[str, Any]:
    """Sigmoids with a bias, chosen in groups, and a shared expert."""
    entry.require("expert_gating_func", SIGMOID)
    entry.require("expert_shared_count", 1)
    entry.require("moe_latent_size", 0)
    groups = entry("expert_group_count", 1)
    return {
        "n_routed_experts": entry("expert_count"),
        "num_experts_per_tok": entry("expert_used_count"),
        "moe_intermediate_size": entry("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": entry(
            "expert_shared_feed_forward_length"
        ),
        "norm_topk_prob": entry.flag("expert_weights_norm", True),
        "routed_scaling_factor": entry.multiplier("expert_weights_scale"),
        "n_group": groups,
        # The file need not say it where there is one group.
        "topk_group": entry("expert_group_used_count", 1 if groups == 1 else None),
    }


def _require_router(entry: Entries, kind: int) -> None:
    """Raises ValueError unless the chosen weights add up to 1."""
    entry.require("expert_gating_func", kind)
    if not entry.flag("expert_weights_norm", True):
        raise entry.error("expert_weights_norm", "must be true", False)
    if (scale := entry.multiplier("expert_weights_scale")) != 1:
        raise entry.error("expert_weights_scale", "must be 1", scale)
