"""Tiny models with recurrent layers, of which GGUF files are written."""

from typing import NamedTuple

import numpy as np

from memjax.models.checkpoints.hf.config import from_hf_config
from memjax.models.checkpoints.hf.parameters import parameter_shapes


class Family(NamedTuple):
    """A family's architecture in GGUF, and a tiny `config.json`."""

    architecture: str
    config: dict


SHARED = {
    "vocab_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False,
}
MAMBA = {
    "hidden_size": 16,
    "mamba_expand": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_d_conv": 4,
    "mamba_conv_bias": True,
}
FAMILIES = {
    "qwen3_5": Family(
        "qwen35",
        SHARED
        | {
            "model_type": "qwen3_5_text",
            "hidden_size": 32,
            "intermediate_size": 32,
            "head_dim": 8,
            "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5},
            "layer_types": ["linear_attention", "full_attention"],
            # Three heads of values for each of two of keys: tiles are no groups.
            "linear_num_value_heads": 6,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            # A block of Q8_0.
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
        },
    ),
    "mamba2": Family(
        "mamba2",
        {
            "model_type": "mamba2",
            "vocab_size": 24,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "head_dim": 8,
            "state_size": 6,
            "n_groups": 2,
            "conv_kernel": 4,
            "layer_norm_epsilon": 1e-3,
            "tie_word_embeddings": True,
        },
    ),
    "granite": Family(
        "granitehybrid",
        SHARED
        | MAMBA
        | {
            "model_type": "granitemoehybrid",
            "shared_intermediate_size": 20,
            "layer_types": ["mamba", "attention"],
            "attention_multiplier": 0.25,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 1.75,
            "tie_word_embeddings": True,
        },
    ),
    "bamba": Family(
        "granitehybrid",
        SHARED
        | MAMBA
        | {
            "model_type": "bamba",
            "intermediate_size": 20,
            "attn_layer_indices": [1],
            "rope_theta": 100.0,
        },
    ),
    "falcon_h1": Family(
        "falcon-h1",
        SHARED
        | MAMBA
        | {
            "model_type": "falcon_h1",
            "intermediate_size": 20,
            "head_dim": 6,
            "mamba_d_ssm": 32,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "rope_theta": 100.0,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.9,
            "key_multiplier": 0.6,
            "ssm_in_multiplier": 1.4,
            "ssm_out_multiplier": 0.75,
            "ssm_multipliers": [0.7, 1.1, 0.9, 1.3, 0.8],
            "mlp_multipliers": [0.8, 1.3],
            "embedding_multiplier": 2.5,
            "lm_head_multiplier": 0.7,
        },
    ),
}


QWEN_EXPERTS = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "shared_expert_intermediate_size": 7,
}
MAMBA1 = {
    "vocab_size": 24,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "expand": 2,
    "state_size": 6,
    "conv_kernel": 4,
    "time_step_rank": 3,
    "layer_norm_epsilon": 1e-3,
    "tie_word_embeddings": True,
}
NEMOTRON = {
    "model_type": "nemotron_h",
    "vocab_size": 24,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "intermediate_size": 20,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 6,
    "n_groups": 2,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-3,
    "tie_word_embeddings": False,
}


def _without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


_DENSE = _without(FAMILIES["qwen3_5"].config, "intermediate_size", "model_type")
FAMILIES |= {
    "qwen3_5_moe": Family(
        "qwen35moe", _DENSE | QWEN_EXPERTS | {"model_type": "qwen3_5_moe_text"}
    ),
    "qwen3_next": Family(
        "qwen3next", _DENSE | QWEN_EXPERTS | {"model_type": "qwen3_next"}
    ),
    "granite_moe": Family(
        "granitehybrid",
        FAMILIES["granite"].config
        | {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 10},
    ),
    "mamba": Family("mamba", MAMBA1 | {"model_type": "mamba"}),
    "falcon_mamba": Family("mamba", MAMBA1 | {"model_type": "falcon_mamba"}),
    "lfm2": Family(
        "lfm2",
        _without(SHARED, "rms_norm_eps")
        | {
            "model_type": "lfm2",
            "hidden_size": 16,
            "intermediate_size": 20,
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 3,
            "norm_eps": 1e-3,
            "rope_theta": 100.0,
            "layer_types": ["conv", "full_attention"],
        },
    ),
    "nemotron_h": Family("nemotron_h", NEMOTRON | {"hybrid_override_pattern": "M-*M"}),
    "nemotron_h_moe": Family(
        "nemotron_h_moe",
        NEMOTRON
        | {
            "hybrid_override_pattern": "ME*",
            "intermediate_size": 10,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 10,
            "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": 7,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
}
ALONE = ("mamba", "falcon_mamba", "mamba2")
MOE = ("qwen3_5_moe", "qwen3_next", "granite_moe", "nemotron_h_moe")


def hf_tensors(family, seed=0):
    """Random tensors by Hugging Face's names."""
    random = np.random.default_rng(seed)
    config = FAMILIES[family].config
    shapes = parameter_shapes(from_hf_config(config), config["model_type"])
    return {
        name: (random.normal(size=shape) * (0.3 if len(shape) > 1 else 0.5)).astype(
            "f4"
        )
        for name, shape in shapes.items()
    }
