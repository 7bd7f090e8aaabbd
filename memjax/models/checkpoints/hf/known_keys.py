"""The keys of `config.json` that transformers knows, and what becomes of them here.

Used when the model is built; of one value only, others being refused by name; without
effect on logits; or, all else, not read, which one line reports.
"""

import logging
from collections.abc import Mapping
from typing import Any

from memjax.checks import joined, short

logger = logging.getLogger(__name__)

_SIZES = {
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "tie_word_embeddings",
    # Refused where there are any.
    "auto_map",
    "quantization_config",
}
_DECODER = _SIZES | {
    "intermediate_size",
    "head_dim",
    "num_key_value_heads",
    "rms_norm_eps",
    "hidden_act",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "layer_types",
}
_WINDOWS = {"sliding_window", "use_sliding_window", "max_window_layers"}
_DELTA = _DECODER | {
    "attention_bias",
    *(f"linear_{kind}_head_dim" for kind in ("key", "value")),
    *(f"linear_num_{kind}_heads" for kind in ("key", "value")),
    "linear_conv_kernel_dim",
}
_MAMBA = (_DECODER - {"layer_types"}) | {
    *("attention_bias", "time_step_limit", "mamba_n_heads", "mamba_d_head"),
    *("mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_expand"),
    *("mamba_conv_bias", "mamba_proj_bias"),
}
_EXPERTS = {
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
    *("shared_expert_intermediate_size", "mlp_only_layers", "decoder_sparse_step"),
}
#: By family.
USED: dict[str, set[str]] = {
    "llama": _DECODER | {"attention_bias", "mlp_bias"},
    "mistral": _DECODER | {"sliding_window"},
    "qwen2": _DECODER | _WINDOWS,
    "qwen3": _DECODER | _WINDOWS | {"attention_bias"},
    "smollm3": _DECODER
    | {"attention_bias", "mlp_bias", "sliding_window", "use_sliding_window"}
    | {"no_rope_layers", "no_rope_layer_interval"},
    "olmo2": _DECODER | {"attention_bias"},
    "gemma3_text": (_DECODER - {"hidden_act"})
    | {"hidden_activation", "attention_bias", "query_pre_attn_scalar"}
    | {"sliding_window", "sliding_window_pattern", "rope_local_base_freq"}
    | {"attn_logit_softcapping", "final_logit_softcapping"}
    | {"use_bidirectional_attention"},
    "opt": _SIZES
    | {"ffn_dim", "word_embed_proj_dim", "do_layer_norm_before", "enable_bias"}
    | {"activation_function", "layer_norm_elementwise_affine"}
    | {"_remove_final_layer_norm"},
    "qwen3_5": {"model_type", "text_config", "tie_word_embeddings"}
    | {"auto_map", "quantization_config"},
    "qwen3_5_text": _DELTA | {"full_attention_interval"},
    "qwen3_5_moe": {"model_type", "text_config", "tie_word_embeddings"}
    | {"auto_map", "quantization_config"},
    "qwen3_5_moe_text": _DELTA | _EXPERTS | {"full_attention_interval"},
    "qwen3_next": _DELTA | _EXPERTS | {"full_attention_interval"},
    "nemotron_h": (_DECODER - {"hidden_act", "rms_norm_eps", "layer_types"})
    | {"attention_bias", "mlp_bias", "use_bias", "use_conv_bias", "mamba_proj_bias"}
    | {"layers_block_type", "hybrid_override_pattern", "layer_norm_epsilon"}
    | {"mlp_hidden_act", "mamba_hidden_act", "mamba_num_heads", "mamba_head_dim"}
    | {"ssm_state_size", "n_groups", "conv_kernel", "time_step_limit"}
    | {"n_routed_experts", "num_experts_per_tok", "n_group"}
    | {"moe_intermediate_size", "moe_shared_expert_intermediate_size", "topk_group"}
    | {"norm_topk_prob", "routed_scaling_factor", "moe_latent_size"},
    "olmo_hybrid": _DELTA | {"linear_allow_neg_eigval"},
    "mamba2": (_SIZES - {"num_attention_heads", "max_position_embeddings"})
    | {"num_heads", "head_dim", "state_size", "n_groups", "conv_kernel", "hidden_act"}
    | {"use_bias", "use_conv_bias", "layer_norm_epsilon", "time_step_limit"},
    "granitemoehybrid": _MAMBA
    | {"layer_types", "shared_intermediate_size", "num_local_experts"}
    | {"num_experts_per_tok"}
    | {"position_embedding_type", "attention_multiplier", "embedding_multiplier"}
    | {"residual_multiplier", "logits_scaling"},
    "bamba": _MAMBA | {"attn_layer_indices", "mlp_bias"},
    "falcon_h1": _MAMBA
    | {"mamba_d_ssm", "mamba_rms_norm", "mamba_norm_before_gate", "mlp_bias"}
    | {"projectors_bias", "attention_in_multiplier", "attention_out_multiplier"}
    | {"ssm_in_multiplier", "ssm_out_multiplier", "ssm_multipliers", "key_multiplier"}
    | {"embedding_multiplier", "lm_head_multiplier", "mlp_multipliers"},
}
_OF_MAMBA = (_SIZES - {"num_attention_heads", "max_position_embeddings"}) | {
    *("expand", "state_size", "time_step_rank", "conv_kernel", "use_conv_bias"),
    *("use_bias", "layer_norm_epsilon", "hidden_act"),
}
_POSITIONS = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}
_OF_FLA = (_SIZES - {"num_attention_heads"}) | {
    *("attn", "num_heads", "hidden_ratio", "intermediate_size", "hidden_act"),
    *("norm_eps", "use_short_conv"),
}
_DELTA_OF_FLA = _OF_FLA | {"expand_v", "use_gate", "allow_neg_eigval", "conv_size"}
_PLAIN_OF_FLA = _OF_FLA | {
    *("expand_k", "expand_v", "feature_map", "num_kv_heads", "elementwise_affine"),
}
USED |= {
    "gated_deltanet": _DELTA_OF_FLA | {"num_v_heads", "head_dim"},
    "delta_net": _DELTA_OF_FLA | {"expand_k", "use_beta", "qk_norm", "qk_activation"},
    "gla": _PLAIN_OF_FLA | {"use_output_gate", "fuse_norm", "clamp_min"},
    "retnet": _PLAIN_OF_FLA | {"use_output_gate", "fuse_norm"},
    "gsa": _PLAIN_OF_FLA
    | {"num_slots", "gate_logit_normalizer", "exapnd_k", "exapnd_v"},
    "hgrn2": (_PLAIN_OF_FLA - {"expand_k", "expand_v", "feature_map"})
    | {"expand_ratio", "use_lower_bound"},
    "lfm2": (_DECODER - {"rms_norm_eps", "hidden_act"})
    | {"norm_eps", "conv_bias", "conv_L_cache", "full_attn_idxs", "tie_embedding"}
    | {"block_ff_dim", "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier"}
    | {"block_multiple_of", "attention_bias"},
    "mamba": _OF_MAMBA,
    "falcon_mamba": _OF_MAMBA | {"mixer_rms_eps"},
    "recurrent_gemma": (_SIZES - {"max_position_embeddings"})
    | _POSITIONS
    | {"original_max_position_embeddings", "num_key_value_heads", "attention_bias"}
    | {"attention_window_size", "lru_width", "conv1d_width", "block_types"}
    | {"intermediate_size", "hidden_activation", "logits_soft_cap", "rms_norm_eps"},
}
#: Entries of `rope_parameters` and `rope_scaling`, of one kind or another.
ROPE = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"),
    *("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    "truncate",
    # Of images: the positions of text are the same in all sections.
    *("mrope_section", "mrope_interleaved"),
}
#: Other values than these, of any family, would change the numbers.
ONLY: dict[str, tuple[Any, ...]] = {
    "pruned_heads": (None, {}),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "rope_interleaved": (None, False),
    # False turns any decoder of transformers 5 into an encoder.
    "is_causal": (None, True),
    "clip_qkv": (None,),
    # Of hybrids, whose classes know nothing else.
    "attn_output_gate": (None, True),
    "mamba_use_mlp": (None, True),
    "rms_norm": (None, True),
    "normalization_function": (None, "rmsnorm"),
    "block_use_swiglu": (None, True),
    "use_pos_enc": (None, True),
    "attnres_block_size": (None,),
}
# How a scan is computed, and how it is initialised.
_STEPS = {"time_step_rank", "time_step_min", "time_step_max", "time_step_floor"}
_OF_MAMBA_ALONE = (_STEPS - {"time_step_rank"}) | {
    *("time_step_scale", "time_step_init_scheme", "residual_in_fp32"),
    *("rescale_prenorm_residual", "use_mambapy", "use_associative_scan"),
    # Derived from `expand`, and former names.
    *("intermediate_size", "use_falcon_mambapy", "d_model", "d_inner", "n_layer"),
    *("fused_add_norm", "pad_vocab_size_multiple"),
}
_RUN_OF_FLA = {
    *("attn_mode", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy"),
    *("fuse_linear_cross_entropy", "use_l2warp"),
}
_PIECES = {"mamba_chunk_size", "num_logits_to_keep"}
#: Without effect in a family, besides `WITHOUT_EFFECT`.
_ROUTING = {"output_router_logits", "router_aux_loss_coef"}
WITHOUT_EFFECT_IN: dict[str, set[str]] = {
    "qwen3_5": {
        "vision_config",
        "image_token_id",
        "video_token_id",
        "language_model_only",
    }
    | {"vision_start_token_id", "vision_end_token_id"},
    # Memories are float32 here; further heads are not read.
    "qwen3_5_text": {"mamba_ssm_dtype", "mtp_num_hidden_layers"}
    | {"mtp_use_dedicated_embeddings"},
    "qwen3_5_moe": {"vision_config", "image_token_id", "video_token_id"}
    | {"language_model_only", "vision_start_token_id", "vision_end_token_id"},
    "qwen3_5_moe_text": {"mamba_ssm_dtype", "mtp_num_hidden_layers"}
    | {"mtp_use_dedicated_embeddings"}
    | _ROUTING,
    "qwen3_next": _ROUTING,
    "nemotron_h": _STEPS
    | _ROUTING
    | {"chunk_size", "expand", "residual_in_fp32", "rescale_prenorm_residual"}
    | {"hidden_dropout", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap"}
    | {"mtp_layers_block_type", "num_logits_to_keep", "num_nextn_predict_layers"}
    | {"use_mamba_kernels", "sliding_window", "n_shared_experts"},
    "olmo_hybrid": {"linear_a_log_min", "linear_a_log_max", "linear_dt_min"}
    | {"linear_dt_max", "linear_dt_init_floor"},
    "mamba2": _STEPS
    | {"chunk_size", "expand", "residual_in_fp32", "rescale_prenorm_residual"}
    | {"norm_before_gate"},
    "granitemoehybrid": _PIECES | _ROUTING | {"init_method"},
    "bamba": _PIECES | {"z_loss_coefficient", "attn_rotary_emb"},
    "falcon_h1": _PIECES | _STEPS | {"mlp_expansion_factor"},
    "lfm2": {"block_dim", "block_mlp_init_scale", "block_out_init_scale", "conv_dim"}
    | {"block_use_xavier_init", "conv_dim_out", "conv_use_xavier_init", "num_heads"}
    | {"block_norm_eps"},
    "gated_deltanet": _RUN_OF_FLA,
    # Its class does not pass this one on.
    "delta_net": _RUN_OF_FLA | {"use_output_norm"},
    "gla": _RUN_OF_FLA | {"conv_size", "use_gk", "use_gv"},
    "gsa": _RUN_OF_FLA
    | {"conv_size", "clamp_min", "clamp_max", "use_output_gate", "use_norm"},
    "retnet": _RUN_OF_FLA | {"conv_size"},
    "hgrn2": _RUN_OF_FLA | {"conv_size"},
    "mamba": _OF_MAMBA_ALONE,
    "falcon_mamba": _OF_MAMBA_ALONE,
    "recurrent_gemma": {"w_init_variance_scale", "final_w_init_variance_scale"}
    # Derived.
    | {"head_dim"},
}
#: Of training, saving, text and classification.
WITHOUT_EFFECT = {
    "_attn_implementation_autoset",
    "_name_or_path",
    # What `layer_types` was made from.
    "_sliding_window_pattern",
    "activation_dropout",
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "dropout",
    "dtype",
    "eos_token_id",
    "id2label",
    "init_std",
    "initializer_range",
    "is_llama_config",
    "label2id",
    "layerdrop",
    # Of Qwen, in SmolLM3's files too.
    "max_window_layers",
    "memjax_origin",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "prefix",
    # How products are divided into parts.
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "tokenizer_class",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
}


def require_only(config: Mapping[str, Any]) -> None:
    """Raises ValueError for a key of `ONLY` with another value."""
    for key, allowed in ONLY.items():
        if (found := config.get(key)) not in allowed:
            raise ValueError(f"{key} must be {allowed[-1]!r}, got {short(found)}")


def known_keys(family: str) -> set[str]:
    """All keys of a family of which is said what becomes of them."""
    alone = WITHOUT_EFFECT_IN.get(family, set())
    return USED[family] | ONLY.keys() | WITHOUT_EFFECT | alone


def _unread_rope(record: Any, where: str) -> list[str]:
    """Entries of RoPE that no kind of it reads, also of a record by kind of layer."""
    unread = []
    for key, value in record.items() if isinstance(record, Mapping) else ():
        if isinstance(value, Mapping):
            unread += _unread_rope(value, f"{where}.{key}")
        elif key not in ROPE and value:
            unread.append(f"{where}.{key}")
    return unread


def report_unread(config: Mapping[str, Any], family: str, where: str) -> None:
    """Logs the keys that are not read, and say something, in one line."""
    known = known_keys(family)
    unread = [key for key, value in config.items() if key not in known and value]
    for key in ("rope_parameters", "rope_scaling"):
        unread += _unread_rope(config.get(key), key)
    if unread:
        logger.warning("%s: not read of config.json: %s", where, joined(unread))
