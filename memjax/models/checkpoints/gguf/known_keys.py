"""The entries of a GGUF file that llama.cpp knows, and what becomes of them here.

Used; of one value only, others being refused by name; without effect on logits and
ids; or, all else, not read, which one line reports. Keys of the architecture are
without its name.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from memjax.checks import joined, short

logger = logging.getLogger(__name__)

_MODEL = {
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "vocab_size",
    "expert_count",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
}
_ATTENTION = _MODEL | {
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_log_multiplier",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
_RECURRENT = {
    f"ssm.{name}"
    for name in ("conv_kernel", "state_size", "group_count", "time_step_rank")
} | {"ssm.inner_size"}
_EXPERTS = {
    f"expert_{name}"
    for name in ("used_count", "feed_forward_length", "shared_feed_forward_length")
} | {"expert_gating_func", "expert_weights_norm", "expert_weights_scale"}
_DELTA = (
    _ATTENTION | _RECURRENT | {"full_attention_interval", "attention.recurrent_layers"}
)
#: Keys of the architecture.
USED = _ATTENTION | {"attention.sliding_window_pattern", "rope.freq_base_swa"}
#: Keys of architectures with recurrent layers, of which some are in `ONLY`; those of
#: experts too where there are any.
USED_BY = {
    "qwen35": _DELTA | {"nextn_predict_layers"},
    "qwen35moe": _DELTA | {"nextn_predict_layers"},
    "qwen3next": _DELTA,
    "mamba": _MODEL | (_RECURRENT - {"ssm.group_count"}) | {"ssm.dt_b_c_rms"},
    "mamba2": _MODEL | _RECURRENT,
    "lfm2": _ATTENTION | {"shortconv.l_cache"},
    "granitehybrid": _ATTENTION
    | _RECURRENT
    | {"attention.scale", "embedding_scale", "residual_scale", "logit_scale"}
    | {"rope.scaling.finetuned", "expert_shared_feed_forward_length"},
    "falcon-h1": _ATTENTION | _RECURRENT,
    "nemotron_h": _ATTENTION | _RECURRENT,
    "nemotron_h_moe": _ATTENTION
    | _RECURRENT
    | {"expert_shared_count", "expert_group_count", "expert_group_used_count"}
    | {"moe_latent_size", "nextn_predict_layers"},
}
#: Other values than these would change the numbers.
ONLY: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "logit_scale": (0, 1),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "rope.scaling.alpha": (0, 1),
    "ssm.dt_b_c_rms": (False,),
    "use_parallel_residual": (False,),
}
#: Steps of llama.cpp's sampler that are not built here, the value that turns each off,
#: and the settings that are without effect then.
SAMPLING: dict[str, tuple[Any, tuple[str, ...]]] = {
    "general.sampling.penalty_repeat": (1, ("general.sampling.penalty_last_n",)),
    "general.sampling.xtc_probability": (0, ("general.sampling.xtc_threshold",)),
    "general.sampling.mirostat": (
        0,
        ("general.sampling.mirostat_tau", "general.sampling.mirostat_eta"),
    ),
}
WITHOUT_EFFECT = {
    "pooling_type",
    # Of images: the positions of text are the same in all sections.
    "rope.dimension_sections",
    "rope.scaling.finetuned",
    "tensor_data_layout",
}
#: Of no architecture: used, or about the file, other tasks and other vocabularies.
GENERAL = re.compile(
    r"general\.(architecture|alignment|type|file_type|quantization_version)"
    r"|general\.sampling\.(temp|top_k|top_p|min_p)"
    r"|general\.(name|author|version|organization|finetune|basename|description|doi)"
    r"|general\.(quantized_by|size_label|license(\..*)?|url|uuid|repo_url|source\..*)"
    r"|general\.(base_model|dataset|datasets)(\..*)?|general\.(tags|languages)"
    r"|split\.(no|count|tensors\.count)"
    r"|tokenizer\.chat_template(s|\..*)?|tokenizer\.(huggingface\.json|rwkv\.world)"
    r"|tokenizer\.ggml\.(model|pre|tokens|token_type|scores|merges)"
    r"|tokenizer\.ggml\.(bos|eos|eot|eom|unknown|padding)_token_id"
    r"|tokenizer\.ggml\.(add_(bos|eos)_token|add_space_prefix)"
    r"|tokenizer\.ggml\.(remove_extra_whitespaces|precompiled_charsmap)"
    r"|tokenizer\.ggml\.(seperator|cls|mask|prefix|suffix|middle|fim_\w+)_token_id"
    r"|tokenizer\.ggml\.(add_sep_token|token_type_count|normalizer\..*)"
    r"|quantize\.imatrix\..*"
)


def check_keys(metadata: Mapping[str, Any], where: str) -> None:
    """Logs the entries that are not read, and say something, in one line.

    Raises:
        ValueError: for an entry of `ONLY` with another value.
    """
    architecture = metadata["general.architecture"]
    prefix, used = f"{architecture}.", USED_BY.get(architecture, USED)
    if metadata.get(f"{prefix}expert_count"):
        used = used | _EXPERTS
    unread, off = [], _turned_off(metadata)
    for key, value in metadata.items():
        own = key.removeprefix(prefix)
        if own == key:
            known = key in off or GENERAL.fullmatch(key) is not None
        elif own in used:
            known = True
        elif own in ONLY:
            if not any(np.array_equal(value, allowed) for allowed in ONLY[own]):
                raise ValueError(
                    f"{where}: {key} must be {ONLY[own][-1]!r}, got {short(value)}"
                )
            known = True
        else:
            known = own in WITHOUT_EFFECT
        if not known and np.any(value):
            unread.append(short(key))
    if unread:
        logger.warning("%s: not read of its metadata: %s", where, joined(unread))


def _turned_off(metadata: Mapping[str, Any]) -> set[str]:
    """The settings of steps of `SAMPLING` that are turned off."""
    off = set()
    for key, (neutral, others) in SAMPLING.items():
        if metadata.get(key, neutral) == neutral:
            off |= {key, *others}
    return off
