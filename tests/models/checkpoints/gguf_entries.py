"""Metadata of tiny models as llama.cpp's converter writes it.

Names are the reference library's.
"""

from tests.models.checkpoints.gguf_models import ALONE, FAMILIES, MOE
from tests.models.checkpoints.gguf_writing import gguf

KEYS = gguf.Keys


def entries(family, **changes):
    """Metadata of a family; with `changes` by the last part of a key."""
    architecture, config = FAMILIES[family]
    pattern = config.get("hybrid_override_pattern", "")
    found = {
        KEYS.LLM.CONTEXT_LENGTH: 2**20 if family in ALONE else 64,
        KEYS.LLM.EMBEDDING_LENGTH: config["hidden_size"],
        KEYS.LLM.BLOCK_COUNT: config.get("num_hidden_layers", len(pattern)),
        KEYS.LLM.VOCAB_SIZE: config["vocab_size"],
        KEYS.Attention.LAYERNORM_RMS_EPS: 1e-3,
        KEYS.LLM.FEED_FORWARD_LENGTH: 0,
        KEYS.Attention.HEAD_COUNT: 0,
        **_of_recurrence(family, config),
    }
    if family not in ALONE:
        found |= _of_attention(family, config)
    if family in MOE:
        found |= _of_experts(family, config)
    known = {
        key.split(".")[-1]: key
        for group in (KEYS.Rope, KEYS.SSM, KEYS.Attention, KEYS.LLM)
        for name, key in vars(group).items()
        if name.isupper()
    }
    # Newer than the library.
    known["recurrent_layers"] = "{arch}.attention.recurrent_layers"
    changed = found | {known[key]: value for key, value in changes.items()}
    return {
        key.format(arch=architecture): value
        for key, value in changed.items()
        if value is not None
    }


def _of_recurrence(family, config):
    if family == "lfm2":
        return {KEYS.ShortConv.L_CACHE: 3}
    if family in ("mamba", "falcon_mamba"):
        return {
            KEYS.SSM.CONV_KERNEL: 4,
            KEYS.SSM.STATE_SIZE: config["state_size"],
            KEYS.SSM.TIME_STEP_RANK: config["time_step_rank"],
            KEYS.SSM.INNER_SIZE: 2 * config["hidden_size"],
            KEYS.SSM.DT_B_C_RMS: family == "falcon_mamba",
        }
    heads, groups, state, width = (config[key] for key in _recurrent_keys(config))
    return {
        KEYS.SSM.CONV_KERNEL: 4,
        KEYS.SSM.STATE_SIZE: state,
        KEYS.SSM.GROUP_COUNT: groups,
        KEYS.SSM.TIME_STEP_RANK: heads,
        KEYS.SSM.INNER_SIZE: heads * width,
    }


def _recurrent_keys(config):
    """Heads of values and of keys, and the width of each."""
    match config["model_type"]:
        case "mamba2":
            return "num_heads", "n_groups", "state_size", "head_dim"
        case "nemotron_h":
            return "mamba_num_heads", "n_groups", "ssm_state_size", "mamba_head_dim"
        case "qwen3_5_text" | "qwen3_5_moe_text" | "qwen3_next":
            counts = "linear_num_value_heads", "linear_num_key_heads"
            return *counts, "linear_key_head_dim", "linear_value_head_dim"
    return "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head"


def _of_attention(family, config):
    hidden = config.get("intermediate_size") or config.get("shared_intermediate_size")
    found = {
        KEYS.LLM.FEED_FORWARD_LENGTH: hidden,
        KEYS.Attention.HEAD_COUNT: config["num_attention_heads"],
        KEYS.Attention.HEAD_COUNT_KV: config["num_key_value_heads"],
        KEYS.Rope.FREQ_BASE: 100.0,
    }
    if "head_dim" in config:
        found[KEYS.Attention.KEY_LENGTH] = config["head_dim"]
        found[KEYS.Attention.VALUE_LENGTH] = config["head_dim"]
    if "qwen" in family:
        found[KEYS.Rope.DIMENSION_COUNT] = 4
        found[KEYS.Rope.DIMENSION_SECTIONS] = [1, 1, 0, 0]
        found[KEYS.LLM.FULL_ATTENTION_INTERVAL] = 2
    if family == "lfm2":
        found[KEYS.Attention.HEAD_COUNT_KV] = [0, 1]
    if family in ("granite", "granite_moe", "bamba"):
        found[KEYS.Attention.HEAD_COUNT_KV] = [0, 1]
        found[KEYS.Rope.DIMENSION_COUNT] = 4 if family == "bamba" else 8
        found[KEYS.Rope.SCALING_FINETUNED] = family == "bamba"
    if "granite" in family:
        found[KEYS.Attention.SCALE] = 0.25
        found[KEYS.LLM.EMBEDDING_SCALE] = 3.0
        found[KEYS.LLM.RESIDUAL_SCALE] = 0.5
        found[KEYS.LLM.LOGIT_SCALE] = 1.75
        found[KEYS.LLM.EXPERT_COUNT] = 0
        found[KEYS.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH] = config[
            "shared_intermediate_size"
        ]
    if "nemotron" in family:
        pattern = config["hybrid_override_pattern"]
        found[KEYS.Attention.HEAD_COUNT_KV] = [int(kind == "*") for kind in pattern]
        widths = [hidden if kind in "-E" else 0 for kind in pattern]
        found[KEYS.LLM.FEED_FORWARD_LENGTH] = widths
        found[KEYS.Rope.SCALING_FINETUNED] = False
    return found


def _of_experts(family, config):
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    found = {
        KEYS.LLM.EXPERT_COUNT: next(config[key] for key in counts if key in config),
        KEYS.LLM.EXPERT_USED_COUNT: config["num_experts_per_tok"],
    }
    if family == "granite_moe":
        return found
    found[KEYS.LLM.EXPERT_FEED_FORWARD_LENGTH] = config["moe_intermediate_size"]
    shared = KEYS.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH
    if family != "nemotron_h_moe":
        return found | {shared: config["shared_expert_intermediate_size"]}
    return found | {
        shared: config["moe_shared_expert_intermediate_size"],
        KEYS.LLM.EXPERT_SHARED_COUNT: 1,
        KEYS.LLM.EXPERT_WEIGHTS_NORM: True,
        KEYS.LLM.EXPERT_WEIGHTS_SCALE: config["routed_scaling_factor"],
        KEYS.LLM.EXPERT_GROUP_COUNT: config["n_group"],
        KEYS.LLM.EXPERT_GROUP_USED_COUNT: config["topk_group"],
    }
