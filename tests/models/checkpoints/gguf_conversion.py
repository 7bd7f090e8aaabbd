"""Tensors of tiny models as llama.cpp's converter writes them.

The rules are those of its `conversion` folder, head by head and row by row. Names are
the reference library's.
"""

import re

import numpy as np

from tests.models.checkpoints.gguf_entries import entries
from tests.models.checkpoints.gguf_models import FAMILIES
from tests.models.checkpoints.gguf_writing import gguf, write


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


def write_file(path, family, tensors, more=(), **changes):
    """A file of these tensors of Hugging Face, with `more` of the file's own."""
    architecture = FAMILIES[family].architecture
    converted = stored(family, tensors) | dict(more)
    return write(path, converted, entries(family, **changes), architecture)
