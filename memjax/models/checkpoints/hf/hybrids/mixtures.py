"""Reads mixtures of experts of published models from `config.json`."""

from collections.abc import Mapping
from typing import Any

from memjax.checks import short
from memjax.models.checkpoints.hf.fields import read_entry, read_size
from memjax.models.language_model.hidden.router import ExpertsConfig


def qwen_experts(config: Mapping[str, Any]) -> ExpertsConfig:
    """Softmax of all, with a gated shared expert."""
    return ExpertsConfig(
        num_experts=read_size(config, "num_experts"),
        experts_per_token=read_size(config, "num_experts_per_tok"),
        hidden_dim=read_size(config, "moe_intermediate_size"),
        renormalize=read_entry(config, "norm_topk_prob", bool, True),
        shared_dim=read_size(config, "shared_expert_intermediate_size"),
        shared_gate=True,
    )


def granite_experts(config: Mapping[str, Any]) -> ExpertsConfig | None:
    """Softmax of the chosen, with a shared expert; None for a dense model."""
    if not read_entry(config, "num_local_experts", int, 0):
        return None
    return ExpertsConfig(
        num_experts=read_size(config, "num_local_experts"),
        experts_per_token=read_size(config, "num_experts_per_tok"),
        hidden_dim=read_size(config, "intermediate_size"),
        shared_dim=read_size(config, "shared_intermediate_size"),
    )


def nemotron_experts(config: Mapping[str, Any]) -> ExpertsConfig | None:
    """Sigmoids with a bias, in groups; None where there are none."""
    if not read_entry(config, "n_routed_experts", int, 0):
        return None
    if config.get("moe_latent_size") is not None:
        raise ValueError(
            f"moe_latent_size must be null, got {short(config['moe_latent_size'])}"
        )
    return ExpertsConfig(
        num_experts=read_size(config, "n_routed_experts"),
        experts_per_token=read_size(config, "num_experts_per_tok"),
        hidden_dim=read_size(config, "moe_intermediate_size"),
        router="sigmoid",
        renormalize=read_entry(config, "norm_topk_prob", bool, True),
        groups=read_size(config, "n_group", 1),
        chosen_groups=read_size(config, "topk_group", 1),
        scale=read_entry(config, "routed_scaling_factor", float, 1.0),
        # Of all shared experts: their number has no effect in transformers.
        shared_dim=read_size(config, "moe_shared_expert_intermediate_size"),
    )
