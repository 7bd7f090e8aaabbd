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
}
#: Other values than these, of any family, would change the numbers.
ONLY: dict[str, tuple[Any, ...]] = {
    "pruned_heads": (None, {}),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "rope_interleaved": (None, False),
    "clip_qkv": (None,),
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


def report_unread(config: Mapping[str, Any], family: str, where: str) -> None:
    """Logs the keys that are not read, and say something, in one line."""
    known = USED[family] | ONLY.keys() | WITHOUT_EFFECT
    unread = [key for key, value in config.items() if key not in known and value]
    if unread:
        logger.warning("%s: not read of config.json: %s", where, joined(unread))
