"""Names of the tensors of published models with recurrent layers.

A family is a row of `HYBRIDS`. Its recurrent layers join several of our parameters in
one matrix; `fused` and `convolved` say which, in the order of the rows:

    q k v z     queries, keys, values, output gate
    rate pace   β, and Δ of the decay

Shapes: D model, H heads of values, G of keys, K key, V value, r = H / G.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from memjax.models.checkpoints.hf.hybrids.scan_names import mamba, rg_lru, short_conv
from memjax.models.checkpoints.hf.tensor import Piece, Tensor
from memjax.models.language_model.config import ModelConfig

#: Names of the parts of fused matrices and of convolutions, in order.
Parts = Mapping[str, tuple[str, ...]]


class HybridNames(NamedTuple):
    """A family's names, below a layer's unless said otherwise.

    Attributes:
        fused: parts of each matrix of a recurrent layer.
        convolved: parts of each convolution.
        single: our name -> theirs, of recurrent parameters that are one tensor.
        norms: of a layer, before the mechanism and the feed-forward.
        output_norms: of a layer that has norms of outputs alone.
        hidden: gate, up and down of the feed-forward; gate and up are one tensor where
            their names are equal.
        mixer: of recurrent layers.
        attention: of attention layers.
        attends: of an attention layer, the norms of queries and keys and the output.
        root: of all layers, and of the embedding and the last norm.
        embedding: the embedding's.
        last_norm: the last norm's.
        by_key_head: whether rows of fused matrices go by key heads.
        less_one: whether norms are stored with 1 taken from them.
    """

    fused: Parts
    convolved: Parts
    single: Mapping[str, str]
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    output_norms: tuple[str, str] = (
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    )
    hidden: tuple[str, str, str] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    mixer: str = "linear_attn"
    attention: str = "self_attn"
    attends: tuple[str, str, str] = ("q_norm", "k_norm", "o_proj")
    root: str = "model"
    embedding: str = "embed_tokens"
    last_norm: str = "norm"
    by_key_head: bool = False
    less_one: bool = False


_QWEN3_5 = HybridNames(
    fused={
        "in_proj_qkv": ("q", "k", "v"),
        "in_proj_z": ("z",),
        "in_proj_b": ("rate",),
        "in_proj_a": ("pace",),
    },
    convolved={"conv1d": ("q", "k", "v")},
    single={"norm": "norm.weight", "output": "out_proj.weight"},
    less_one=True,
)
_OLMO_HYBRID = HybridNames(
    fused={
        **{f"{part}_proj": (part,) for part in "qkv"},
        "g_proj": ("z",),
        "b_proj": ("rate",),
        "a_proj": ("pace",),
    },
    convolved={f"{part}_conv1d": (part,) for part in "qkv"},
    single={"norm": "o_norm.weight", "output": "o_proj.weight"},
    norms=("attention_layer_norm", "feedforward_layer_norm"),
)
_MAMBA2 = HybridNames(
    fused={"in_proj": ("z", "v", "k", "q", "pace")},
    convolved={"conv1d": ("v", "k", "q")},
    single={"norm": "norm.weight", "output": "out_proj.weight", "skip": "D"},
    norms=("norm", "norm"),
    mixer="mixer",
    root="backbone",
    embedding="embeddings",
    last_norm="norm_f",
)
_GRANITE = _MAMBA2._replace(
    norms=("input_layernorm", "post_attention_layernorm"),
    hidden=(
        "shared_mlp.input_linear",
        "shared_mlp.input_linear",
        "shared_mlp.output_linear",
    ),
    mixer="mamba",
    root="model",
    embedding="embed_tokens",
    last_norm="norm",
)
_BAMBA = _GRANITE._replace(
    norms=("input_layernorm", "pre_ff_layernorm"),
    hidden=tuple(f"feed_forward.{name}_proj" for name in ("gate", "up", "down")),
    last_norm="final_layernorm",
)
_NO_ROWS: Any = {"fused": {}, "convolved": {}, "single": {}}
_LFM2 = HybridNames(
    **_NO_ROWS,
    norms=("operator_norm", "ffn_norm"),
    hidden=("feed_forward.w1", "feed_forward.w3", "feed_forward.w2"),
    mixer="conv",
    attends=("q_layernorm", "k_layernorm", "out_proj"),
    last_norm="embedding_norm",
)
_RECURRENT_GEMMA = HybridNames(
    **_NO_ROWS,
    norms=("temporal_pre_norm", "channel_pre_norm"),
    hidden=("mlp_block.gate_proj", "mlp_block.up_proj", "mlp_block.down_proj"),
    mixer="temporal_block",
    attention="temporal_block",
    last_norm="final_norm",
    less_one=True,
)
#: Mechanisms whose tensors have the same names in all families.
SCANS = {"short_conv": short_conv, "mamba": mamba, "rg_lru": rg_lru}
#: By `model_type`.
HYBRIDS = {
    "qwen3_5_text": _QWEN3_5,
    "olmo_hybrid": _OLMO_HYBRID,
    "mamba2": _MAMBA2,
    "granitemoehybrid": _GRANITE,
    "bamba": _BAMBA,
    "falcon_h1": _BAMBA,
    "lfm2": _LFM2,
    "mamba": _MAMBA2,
    "falcon_mamba": _MAMBA2,
    "recurrent_gemma": _RECURRENT_GEMMA,
}


def hybrid_names(config: ModelConfig, names: HybridNames) -> dict[str, Any]:
    """The tensor of every parameter; see `tensor_names`."""
    root = names.root
    found = {
        "embedding": Tensor(f"{root}.{names.embedding}.weight"),
        "blocks": {
            i: _block(config, i, f"{root}.layers.{i}", names)
            for i in range(config.num_layers)
        },
        "norm": _norm(names, f"{root}.{names.last_norm}"),
    }
    if not config.tied_head:
        found["head"] = Tensor("lm_head.weight", "into")
    return found


def _norm(names, at):
    return Tensor(f"{at}.weight", "less_one" if names.less_one else "as_is")


def _block(config, layer, at, names):
    """The tensors of one layer."""
    mechanism, style = config.layers[layer], config.style(layer)
    parts = {}
    if mechanism.attention is not None:
        heads = mechanism.attention
        parts["attention"] = _attention(heads, f"{at}.{names.attention}", names)
    memory = getattr(mechanism, "memory", mechanism)
    if memory.name in ("gated_deltanet", "mamba2"):
        parts["memory"] = _recurrent(memory, f"{at}.{names.mixer}", names)
    elif memory.name in SCANS:
        parts["memory"] = SCANS[memory.name](memory, f"{at}.{names.mixer}")
    (mine, *others) = parts.values()
    before, behind = names.norms if style.norm_first else names.output_norms
    found = {
        "mechanism": parts if others else mine,
        "mechanism_norm": _norm(names, f"{at}.{before}"),
    }
    if style.feed_forward != "none":
        width = style.hidden_dim or config.hidden_dim
        biased = config.architecture.feed_forward_bias
        found["feed_forward"] = _feed_forward(width, at, names, biased)
        found["feed_forward_norm"] = _norm(names, f"{at}.{behind}")
    return found


def _feed_forward(width, at, names, biased):
    gate, up, down = (f"{at}.{name}.weight" for name in names.hidden)
    joined = 2 * width if gate == up else 0
    found = {
        "gate": _into(gate, 0, width, joined),
        "up": _into(up, width, width, joined),
        "down": Tensor(down, "into"),
    }
    if biased:
        for ours, theirs in zip(("gate", "up", "down"), names.hidden, strict=True):
            found[f"{ours}_bias"] = Tensor(f"{at}.{theirs}.bias")
    return found


def _into(name, first, count, whole):
    """A matrix, or rows of one of `whole` rows."""
    if not whole:
        return Tensor(name, "into")
    return Tensor("", "into", (Piece(name, np.arange(first, first + count), whole),))


def _attention(heads, at, names):
    """The tensors of an attention layer, with gates behind each head's queries."""
    query_norm, key_norm, output = names.attends
    found = {
        "query": Tensor(f"{at}.q_proj.weight", "into"),
        "key": Tensor(f"{at}.k_proj.weight", "into"),
        "value": Tensor(f"{at}.v_proj.weight", "into"),
        "output": Tensor(f"{at}.{output}.weight", "out_of"),
    }
    for name, ours in (("q", "query"), ("k", "key"), ("v", "value")):
        if heads.qkv_bias:
            found[f"{ours}_bias"] = Tensor(f"{at}.{name}_proj.bias", "flat")
    if heads.output_bias:
        found["output_bias"] = Tensor(f"{at}.{output}.bias", "flat")
    if heads.output_gate:
        widths = {"query": heads.head_dim, "gate": heads.head_dim}
        rows, count = part_rows(widths, heads.num_heads, by_head=True)
        name = f"{at}.q_proj.weight"
        for ours in widths:
            found[ours] = Tensor("", "into", (Piece(name, rows[ours], count),))
    for ours, theirs in (("query_norm", query_norm), ("key_norm", key_norm)):
        if heads.qk_norm == "head":
            found[ours] = _norm(names, f"{at}.{theirs}")
        elif heads.qk_norm == "width":
            found[ours] = Tensor(f"{at}.{theirs}.weight", "flat")
    return found


def part_rows(
    widths: Mapping[str, int], heads: int, by_head: bool
) -> tuple[dict[str, np.ndarray], int]:
    """Rows of each part of a fused matrix, and their number in all.

    Args:
        widths: rows of each part for one head, in order.
        heads: how many heads there are.
        by_head: whether all parts of a head come before the next head's; else all
            heads of a part come before the next part.
    """
    stride = sum(widths.values())
    rows, first = {}, 0
    for part, width in widths.items():
        if by_head:
            starts = first + stride * np.arange(heads)
            rows[part] = (starts[:, None] + np.arange(width)).reshape(-1)
            first += width
        else:
            rows[part] = np.arange(first, first + heads * width)
            first += heads * width
    return rows, heads * stride


def _recurrent(config, at, names):
    """The tensors of a recurrent layer."""
    style, groups = config.style, config.key_heads
    ways = config.num_heads // groups
    widths = {
        "q": config.key_dim,
        "k": config.key_dim,
        "v": ways * config.value_dim,
        "z": ways * config.value_dim,
        "rate": ways,
        "pace": ways,
    }

    def pieces(tables, suffix, by_head):
        found = {}
        for tensor, parts in tables.items():
            sizes = {part: widths[part] for part in parts}
            rows, count = part_rows(sizes, groups, by_head)
            name = f"{at}.{tensor}.{suffix}"
            found |= {part: Piece(name, rows[part], count) for part in parts}
        return found

    fused = pieces(names.fused, "weight", names.by_key_head)
    taps = pieces(names.convolved, "weight", False)
    single = {ours: f"{at}.{theirs}" for ours, theirs in names.single.items()}
    pace = {
        "weight": Tensor("", "into", (fused["pace"],)),
        "bias": Tensor(f"{at}.dt_bias"),
    }
    decay = {"pace": pace, "log_rate": Tensor(f"{at}.A_log")}
    cell: dict[str, Any] = {"decay": decay}
    if "rate" in fused:
        cell["rate"] = Tensor("", "into", (fused["rate"],))
    if "skip" in single:
        cell["skip"] = Tensor(single["skip"])
    found = {
        "query_key": Tensor("", "into", (fused["q"], fused["k"])),
        "value": Tensor("", "into", (fused["v"],)),
        "gate": Tensor("", "into", (fused["z"],)),
        "filters": Tensor("", "taps", (taps["q"], taps["k"])),
        "value_filters": Tensor("", "taps", (taps["v"],)),
        "output": Tensor(single["output"], "out_of"),
        "cell": cell,
    }
    if style.norm != "none":
        layout = "as_is" if style.norm == "head" else "flat"
        found["norm"] = Tensor(single["norm"], layout)
    if style.conv_bias:
        biases = pieces(names.convolved, "bias", False)
        found["filter_bias"] = Tensor("", "flat", (biases["q"], biases["k"]))
        found["value_bias"] = Tensor("", "flat", (biases["v"],))
    return found


def hybrid_family(config: ModelConfig) -> str | None:
    """The family that a model with recurrent layers is written as; None without one."""
    kinds = {mechanism.name: mechanism for mechanism in config.mechanisms}
    if "parallel" in kinds:
        return "falcon_h1"
    if "mamba" in kinds:
        normed: Any = kinds["mamba"]
        return "mamba" if normed.norm_epsilon is None else "falcon_mamba"
    for name, family in (("short_conv", "lfm2"), ("rg_lru", "recurrent_gemma")):
        if name in kinds:
            return family
    memories: list[Any] = [kinds[n] for n in ("gated_deltanet", "mamba2") if n in kinds]
    if len(memories) != 1 or not memories[0].style.conv_value:
        return None
    (memory,) = memories
    attends = [m.attention for m in config.mechanisms if m.attention]
    if memory.name == "gated_deltanet":
        gated = math.isclose(memory.max_rate, 1.0)
        return "qwen3_5_text" if gated else "olmo_hybrid"
    if not attends and config.style(0).feed_forward == "none":
        return "mamba2"
    return "bamba" if any(heads.rope_dim for heads in attends) else "granitemoehybrid"
