"""Tiny hybrids in Hugging Face's form and as llama.cpp's converter writes them.

The rules are those of its `conversion` folder, head by head and row by row. Names of
tensors and of metadata are the reference library's.
"""

import re
from typing import NamedTuple

import numpy as np

from memjax.models.checkpoints.hf.config import from_hf_config
from memjax.models.checkpoints.hf.parameters import parameter_shapes
from tests.models.checkpoints.gguf_writing import gguf, write

KEYS = gguf.Keys


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
#: Those whose numbers are compared tensor by tensor alone.
FURTHER = {
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
# Experts are read from a folder first.
FURTHER = {k: v for k, v in FURTHER.items() if k in ("mamba", "falcon_mamba", "lfm2")}
FAMILIES |= FURTHER
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


def stored(family, tensors):
    """The tensors of a file, by their names there."""
    architecture, config = FAMILIES[family]
    kinds = gguf.MODEL_ARCH_NAMES.items()
    kind = next(kind for kind, name in kinds if name == architecture)
    names = gguf.get_tensor_name_map(kind, 4)
    result, experts = {}, {}
    for name, value in tensors.items():
        for part, converted in CONVERT[family](name, value, config):
            part = part.replace("dt_bias", "dt_proj.bias")
            every = re.sub(r"\.experts\.\d+\.", ".experts.", part)
            own = names.get_name(every, (".weight", ".bias"))
            assert own is not None, part
            if every == part:
                result[own] = converted
            else:
                experts.setdefault(own, []).append(converted)
    return result | {own: np.stack(each) for own, each in experts.items()}


def _recurrent(name, value):
    """What all recurrent layers have otherwise."""
    if name.endswith("A_log"):
        return -np.exp(value)
    return value[:, 0] if name.endswith("conv1d.weight") else value


def _mamba2(name, value, config):
    groups = config.get("n_groups") or config["mamba_n_groups"]
    value = _recurrent(name, value)
    if name.endswith(("A_log", ".D")):
        value = value[:, None]
    if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        value = value.reshape(groups, -1)
    yield name, value


def _qwen35(name, value, config):
    value = _recurrent(name, value)
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        value = value + 1
    of_values = ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight")
    first = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    if name.endswith((*of_values, "A_log", "dt_bias")):
        value = _tiled(value, config)
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        value = np.concatenate([value[:first], _tiled(value[first:], config)])
    if name.endswith("out_proj.weight"):
        value = _tiled(value.T, config).T
    yield name, np.ascontiguousarray(value)


def _qwen3_next(name, value, config):
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        value = value + 1
    if not name.endswith("in_proj_qkvz.weight"):
        yield name, _recurrent(name, value)
        return
    groups, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    ways = config["linear_num_value_heads"] // groups
    values = ways * config["linear_value_head_dim"]
    parts = [[], [], [], []]
    for of_group in np.split(value, groups):
        cuts = np.cumsum([key, key, values])
        for part, rows in zip(parts, np.split(of_group, cuts), strict=True):
            part.append(rows)
    q, k, v, z = map(np.concatenate, parts)
    at = name.removesuffix("in_proj_qkvz.weight")
    yield f"{at}in_proj_qkv.weight", np.concatenate([q, k, v])
    yield f"{at}in_proj_z.weight", z


def _tiled(rows, config):
    """The first value head of each key head, then the second of each, and so on."""
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    ways = heads // groups
    of_head = np.split(rows, heads)
    order = [group * ways + way for way in range(ways) for group in range(groups)]
    return np.concatenate([of_head[head] for head in order])


def _granite(name, value, config):
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        value = _interleaved(value, config)
    if name.endswith("shared_mlp.input_linear.weight"):
        gate, up = np.split(value, 2)
        at = name.removesuffix("shared_mlp.input_linear.weight")
        yield f"{at}mlp.gate_proj.weight", gate
        yield f"{at}mlp.up_proj.weight", up
    elif name.endswith("shared_mlp.output_linear.weight"):
        yield name.replace("shared_mlp.output_linear", "mlp.down_proj"), value
    else:
        yield from _mamba2(name, value, config)


def _granite_moe(name, value, config):
    at, _, last = name.partition("block_sparse_moe.")
    if last == "input_linear.weight":
        gate, up = np.split(value, 2, axis=1)
        yield f"{at}mlp.experts.gate_proj.weight", gate
        yield f"{at}mlp.experts.up_proj.weight", up
    elif name.endswith("shared_mlp.output_linear.weight"):
        yield name, value
    else:
        for part, converted in _granite(name, value, config):
            yield part.replace(".mlp.", ".mlp.shared_expert."), converted


def _mamba1(name, value, config):
    yield name, _recurrent(name, value)


def _lfm2(name, value, config):
    yield name, value[:, 0] if name.endswith("conv.conv.weight") else value


def _nemotron(name, value, config):
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        value = _interleaved(value, config)
    name = name.replace("score_correction_bias", "score_correction.bias")
    if ".experts." in name:
        name = name.replace("backbone", "model").replace("mixer", "mlp")
    yield from _mamba2(name, value, config)


def _interleaved(rows, config):
    """Channels half a head apart next to each other."""
    width = config["hidden_size"] // config["num_attention_heads"]
    width = config.get("head_dim", width)
    result = np.empty_like(rows)
    for row in range(len(rows)):
        head, channel = divmod(row, width)
        half, pair = divmod(channel, width // 2)
        result[head * width + 2 * pair + half] = rows[row]
    return result


def _falcon_h1(name, value, config):
    inside = config["attention_in_multiplier"]
    gate, down = config["mlp_multipliers"]
    factors = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": inside * config["key_multiplier"],
        "q_proj": inside,
        "v_proj": inside,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    factor = factors.get(name.split(".")[-2], 1.0)
    if name.endswith("in_proj.weight"):
        inner = config["mamba_d_ssm"]
        state = config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = (inner, inner, state, state, config["mamba_n_heads"])
        factor = np.repeat(config["ssm_multipliers"], sizes)[:, None]
        factor = factor * config["ssm_in_multiplier"]
    yield from _mamba2(name, (value * factor).astype("f4"), config)


CONVERT = {
    "qwen3_5": _qwen35,
    "mamba2": _mamba2,
    "granite": _granite,
    "bamba": _granite,
    "falcon_h1": _falcon_h1,
    "qwen3_5_moe": _qwen35,
    "qwen3_next": _qwen3_next,
    "granite_moe": _granite_moe,
    "mamba": _mamba1,
    "falcon_mamba": _mamba1,
    "lfm2": _lfm2,
    "nemotron_h": _nemotron,
    "nemotron_h_moe": _nemotron,
}


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


def write_file(path, family, tensors, more=(), **changes):
    """A file of these tensors of Hugging Face, with `more` of the file's own."""
    architecture = FAMILIES[family].architecture
    converted = stored(family, tensors) | dict(more)
    return write(path, converted, entries(family, **changes), architecture)
