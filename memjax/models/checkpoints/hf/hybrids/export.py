"""Writes `config.json` of published models with recurrent layers.

The inverse of `config`: what is written is read back and compared.
"""

import math
from collections.abc import Callable
from typing import Any

from memjax.mechanisms import GatedDeltaNetConfig, Mamba2Config
from memjax.mechanisms.layers.heads import HeadsConfig
from memjax.models.checkpoints.hf.hybrids.config import READ
from memjax.models.checkpoints.hf.hybrids.difference import (
    attention_of,
    experts_of,
    require_same,
)
from memjax.models.checkpoints.hf.hybrids.entries import (
    decoder,
    memory_of,
    multiple_of_model,
)
from memjax.models.checkpoints.hf.hybrids.fla.export import WRITE_FLA
from memjax.models.checkpoints.hf.hybrids.layers import FULL, LINEAR
from memjax.models.checkpoints.hf.hybrids.scan_export import (
    to_lfm2,
    to_mamba,
    to_recurrent_gemma,
)
from memjax.models.language_model.config import ModelConfig

Write = Callable[[ModelConfig], dict[str, Any]]


def to_hybrid_config(config: ModelConfig, family: str) -> dict[str, Any]:
    """The `config.json` of a family from which transformers builds the same function.

    Args:
        config: the model.
        family: from `hybrid_family`.

    Raises:
        ValueError: naming the first field that the family has otherwise.
    """
    write, architecture = WRITE[family]
    described = {
        "model_type": family,
        "architectures": [architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied_head,
    } | write(config)
    require_same(config, READ[family](described, config.dtype), family)
    return described


def _to_qwen3_5(config: ModelConfig) -> dict[str, Any]:
    return (
        decoder(config)
        | {"head_dim": attention_of(config).head_dim}
        | {"layer_types": _layer_types(config)}
        | _gated_deltanet(memory_of(config, "gated_deltanet"))
    )


def _to_qwen3_next(config: ModelConfig) -> dict[str, Any]:
    mixture = experts_of(config)
    assert mixture is not None
    layers = range(config.num_layers)
    return _to_qwen3_5(config) | {
        "num_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.experts_per_token,
        "moe_intermediate_size": mixture.hidden_dim,
        "norm_topk_prob": mixture.renormalize,
        "shared_expert_intermediate_size": mixture.shared_dim,
        "mlp_only_layers": [i for i in layers if config.style(i).experts is None],
        "decoder_sparse_step": 1,
    }


def _to_olmo_hybrid(config: ModelConfig) -> dict[str, Any]:
    if LINEAR not in (types := _layer_types(config)) or FULL not in types:
        raise ValueError(
            "mechanisms must have recurrent layers and attention in olmo_hybrid, got "
            f"{types}"
        )
    memory = memory_of(config, "gated_deltanet")
    return (
        decoder(config)
        | {"layer_types": types, "linear_allow_neg_eigval": memory.max_rate > 1}
        | _gated_deltanet(memory)
    )


def _to_mamba2(config: ModelConfig) -> dict[str, Any]:
    memory = memory_of(config, "mamba2")
    return {
        "num_heads": memory.num_heads,
        "head_dim": memory.value_dim,
        "state_size": memory.key_dim,
        "n_groups": memory.key_heads,
        "conv_kernel": memory.style.conv_width,
        "expand": _expansion(config, memory),
        "use_bias": False,
        "use_conv_bias": memory.style.conv_bias,
        "layer_norm_epsilon": config.norm_epsilon,
    } | _pace_limits(memory)


def _to_granite(config: ModelConfig) -> dict[str, Any]:
    heads, style = attention_of(config), config.architecture
    names = {FULL: "attention", LINEAR: "mamba"}
    memories: list[Any] = [m for m in config.mechanisms if m.name == "mamba2"]
    found = {
        "layer_types": [names[kind] for kind in _layer_types(config)],
        "attention_multiplier": _query_scale(heads),
        "embedding_multiplier": style.embedding_multiplier,
        "residual_multiplier": style.residual_multiplier,
        "logits_scaling": 1 / style.logits_multiplier,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": config.hidden_dim,
        "position_embedding_type": "nope" if heads.rope_theta is None else "rope",
    }
    if (mixture := experts_of(config)) is not None:
        found |= {
            "num_local_experts": mixture.num_experts,
            "num_experts_per_tok": mixture.experts_per_token,
            "intermediate_size": mixture.hidden_dim,
            "shared_intermediate_size": mixture.shared_dim,
        }
    memory = _mamba(config, memories[0]) if memories else {}
    return decoder(config) | found | memory


def _to_bamba(config: ModelConfig) -> dict[str, Any]:
    kinds = _layer_types(config)
    attends = [i for i, kind in enumerate(kinds) if kind == FULL]
    memory = _mamba(config, memory_of(config, "mamba2"))
    return decoder(config) | memory | {"attn_layer_indices": attends, "mlp_bias": False}


def _to_falcon_h1(config: ModelConfig) -> dict[str, Any]:
    both = memory_of(config, "parallel")
    heads, memory, style = both.attention_layer, both.memory, both.memory.style
    model = config.architecture
    # Multipliers of inputs are in those of what is made of them.
    found = {
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": both.attention_multiplier,
        "key_multiplier": _query_scale(heads) / heads.head_dim**-0.5,
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": both.memory_multiplier,
        "ssm_multipliers": [
            *(style.gate_multiplier, style.value_multiplier, style.key_multiplier),
            *(style.query_multiplier, style.cell_multiplier),
        ],
        "embedding_multiplier": model.embedding_multiplier,
        "lm_head_multiplier": model.logits_multiplier,
        "mlp_multipliers": list(model.feed_forward_multipliers),
        "mamba_d_ssm": memory.num_heads * memory.value_dim,
        "mamba_rms_norm": style.norm != "none",
        "mamba_norm_before_gate": not style.gate_first,
        "mlp_bias": False,
        "projectors_bias": False,
    }
    return decoder(config) | _mamba_sizes(memory) | found


def _to_nemotron_h(config: ModelConfig) -> dict[str, Any]:
    memory, mixture = memory_of(config, "mamba2"), experts_of(config)
    branches = []
    for i, kind in enumerate(_layer_types(config)):
        style = config.style(i)
        branches.append(kind)
        if style.feed_forward != "none":
            branches.append("moe" if style.experts else "mlp")
    heads = attention_of(config)
    found = {
        "num_hidden_layers": len(branches),
        "layers_block_type": branches,
        "layer_norm_epsilon": config.norm_epsilon,
        "head_dim": heads.head_dim,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "mamba_num_heads": memory.num_heads,
        "mamba_head_dim": memory.value_dim,
        "ssm_state_size": memory.key_dim,
        "n_groups": memory.key_heads,
        "conv_kernel": memory.style.conv_width,
        "use_conv_bias": memory.style.conv_bias,
    } | {key: False for key in ("use_bias", "mlp_bias", "mamba_proj_bias")}
    if mixture is not None:
        found |= {
            "n_routed_experts": mixture.num_experts,
            "num_experts_per_tok": mixture.experts_per_token,
            "moe_intermediate_size": mixture.hidden_dim,
            "norm_topk_prob": mixture.renormalize,
            "n_group": mixture.groups,
            "topk_group": mixture.chosen_groups,
            "routed_scaling_factor": mixture.scale,
            "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": mixture.shared_dim,
        }
    return decoder(config) | _pace_limits(memory) | found


#: By family: its writer, and its class in transformers.
WRITE: dict[str, tuple[Write, str]] = {
    "qwen3_5_text": (_to_qwen3_5, "Qwen3_5ForCausalLM"),
    "qwen3_next": (_to_qwen3_next, "Qwen3NextForCausalLM"),
    "nemotron_h": (_to_nemotron_h, "NemotronHForCausalLM"),
    "olmo_hybrid": (_to_olmo_hybrid, "OlmoHybridForCausalLM"),
    "mamba2": (_to_mamba2, "Mamba2ForCausalLM"),
    "granitemoehybrid": (_to_granite, "GraniteMoeHybridForCausalLM"),
    "bamba": (_to_bamba, "BambaForCausalLM"),
    "falcon_h1": (_to_falcon_h1, "FalconH1ForCausalLM"),
    "lfm2": (to_lfm2, "Lfm2ForCausalLM"),
    "mamba": (to_mamba, "MambaForCausalLM"),
    "falcon_mamba": (to_mamba, "FalconMambaForCausalLM"),
    "recurrent_gemma": (to_recurrent_gemma, "RecurrentGemmaForCausalLM"),
} | WRITE_FLA


def _gated_deltanet(memory: GatedDeltaNetConfig) -> dict[str, Any]:
    return {
        "linear_num_key_heads": memory.key_heads,
        "linear_num_value_heads": memory.num_heads,
        "linear_key_head_dim": memory.key_dim,
        "linear_value_head_dim": memory.value_dim,
        "linear_conv_kernel_dim": memory.style.conv_width,
    }


def _mamba(config: ModelConfig, memory: Mamba2Config) -> dict[str, Any]:
    """The entries of a layer whose channels are a multiple of the model's."""
    return _mamba_sizes(memory) | {"mamba_expand": _expansion(config, memory)}


def _mamba_sizes(memory: Mamba2Config) -> dict[str, Any]:
    return {
        "mamba_n_heads": memory.num_heads,
        "mamba_d_head": memory.value_dim,
        "mamba_n_groups": memory.key_heads,
        "mamba_d_state": memory.key_dim,
        "mamba_d_conv": memory.style.conv_width,
        "mamba_conv_bias": memory.style.conv_bias,
        "mamba_proj_bias": False,
    } | _pace_limits(memory)


def _pace_limits(memory: Mamba2Config) -> dict[str, Any]:
    if memory.pace_limits is None:
        return {}
    low, high = memory.pace_limits
    # As transformers 5 writes infinity, which JSON has not.
    finite = high if math.isfinite(high) else {"__float__": "Infinity"}
    return {"time_step_limit": [low, finite]}


def _query_scale(heads: HeadsConfig) -> float:
    return heads.query_scale or heads.head_dim**-0.5


def _layer_types(config: ModelConfig) -> list[str]:
    return [FULL if m.attention is not None else LINEAR for m in config.layers]


def _expansion(config: ModelConfig, memory: Mamba2Config) -> int:
    inner = memory.num_heads * memory.value_dim
    return multiple_of_model(config, "num_heads * value_dim", inner)
