"""Small configs of published hybrids."""

from typing import Any

from memjax.models import ModelConfig
from memjax.models.checkpoints.hf.config import from_hf_config

SIZES = {
    "vocab_size": 31,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e3, "rope_type": "default"},
}
KINDS = {"layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 3, "mamba_n_groups": 2, "mamba_d_conv": 3}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 4,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3_5_text": KINDS | DELTA | {"head_dim": 8},
    "mamba2": {"num_heads": 4, "head_dim": 4, "state_size": 3, "n_groups": 2},
    "mamba": {"intermediate_size": 16, "state_size": 3, "time_step_rank": 2},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 16},
    "olmo_hybrid": DELTA
    | {"layer_types": 2 * KINDS["layer_types"], "num_hidden_layers": 4},
    "granitemoehybrid": KINDS | MAMBA | {"shared_intermediate_size": 12},
}


def config(name: str, **changes: Any) -> ModelConfig:
    """The model of a small published config; None in `changes` removes an entry."""
    entries = SIZES | PUBLISHED[name] | {"model_type": name} | changes
    return from_hf_config({k: v for k, v in entries.items() if v is not None})
