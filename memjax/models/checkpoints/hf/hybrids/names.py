"""Names of the tensors of published models with recurrent layers.

A family is a row of `tables.HYBRIDS`.

Shapes: D model, H heads of values, G of keys, K key, V value, r = H / G.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from memjax.mechanisms.layers.recurrent.style import RecurrentSizes
from memjax.models.checkpoints.hf.hybrids.scan_names import mamba, rg_lru, short_conv
from memjax.models.checkpoints.hf.hybrids.tables import MATRICES, HybridNames
from memjax.models.checkpoints.hf.tensor import Layout, Piece, Tensor
from memjax.models.language_model.config import ModelConfig

#: Mechanisms whose tensors have the same names in all families.
SCANS = {"short_conv": short_conv, "mamba": mamba, "rg_lru": rg_lru}
#: Layouts of a cell's parameters that are one tensor.
_SINGLE: dict[str, Layout] = {
    "skip": "as_is",
    "narrow": "into",
    "widen": "into",
    "bias": "flat",
    "forget": "into",
    "bound": "flat",
}


def hybrid_names(config: ModelConfig, names: HybridNames) -> dict[str, Any]:
    """The tensor of every parameter; see `tensor_names`."""
    root = names.root
    found = {
        "embedding": Tensor(f"{root}.{names.embedding}.weight"),
        "blocks": {
            i: _block(
                config, i, f"{root}.layers.{at}", f"{root}.layers.{behind}", names
            )
            for i, (at, behind) in enumerate(_places(config, names.one_branch))
        },
        "norm": _norm(names, f"{root}.{names.last_norm}"),
    }
    if not config.tied_head:
        found["head"] = Tensor("lm_head.weight", "into")
    return found


def _norm(names, at):
    return Tensor(f"{at}.weight", "less_one" if names.less_one else "as_is")


def _places(config, one_branch):
    """Numbers of a layer's mechanism and of its feed-forward in the file."""
    next_place = 0
    for i in range(config.num_layers):
        hidden = one_branch and config.style(i).feed_forward != "none"
        yield next_place, next_place + hidden
        next_place += 1 + hidden


def _block(config, layer, at, at_hidden, names):
    """The tensors of one layer."""
    mechanism, style = config.layers[layer], config.style(layer)
    parts = {}
    if mechanism.attention is not None:
        heads = mechanism.attention
        parts["attention"] = _attention(heads, f"{at}.{names.attention}", names)
    memory = getattr(mechanism, "memory", mechanism)
    if isinstance(memory, RecurrentSizes):
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
        found["feed_forward_norm"] = _norm(names, f"{at_hidden}.{behind}")
        if style.experts:
            found["feed_forward"] = _experts(config, style, at_hidden, names.experts)
        else:
            width = style.hidden_dim or config.hidden_dim
            biased = config.architecture.feed_forward_bias
            found["feed_forward"] = _feed_forward(
                width, style, at_hidden, names.hidden, biased
            )
    return found


def _feed_forward(width, style, at, hidden, biased=False):
    gate, up, down = (f"{at}.{name}.weight" for name in hidden)
    joined = 2 * width if gate == up else 0
    found = {
        "gate": _into(gate, 0, width, joined),
        "up": _into(up, width, width, joined),
        "down": Tensor(down, "into"),
    }
    if biased:
        for ours, theirs in zip(MATRICES, hidden, strict=True):
            found[f"{ours}_bias"] = Tensor(f"{at}.{theirs}.bias")
    return _without_gate(found) if style.feed_forward == "relu2" else found


def _without_gate(found):
    return {name: tensor for name, tensor in found.items() if name != "gate"}


def _experts(config, style, at, names):
    """The tensors of a mixture of experts."""
    mixture, d = style.experts, config.model_dim
    width = mixture.hidden_dim
    gate, up, down = names.routed
    joined = 2 * width if gate == up else width

    def matrices(name, first, count, total):
        rows = np.arange(first, first + count)
        each = mixture.num_experts if "{}" in name else 1
        pieces = (Piece(f"{at}.{name.format(i)}", rows, total) for i in range(each))
        return Tensor("", "experts", tuple(pieces))

    routed = {
        "gate": matrices(gate, 0, width, joined),
        "up": matrices(up, joined - width, width, joined),
        "down": matrices(down, 0, d, d),
    }
    found: dict[str, Any] = {
        "router": Tensor(f"{at}.{names.router}", "into"),
        "routed": _without_gate(routed) if style.feed_forward == "relu2" else routed,
    }
    if mixture.router == "sigmoid":
        found["router_bias"] = Tensor(f"{at}.{names.router_bias}")
    if mixture.shared_dim:
        found["shared"] = _feed_forward(mixture.shared_dim, style, at, names.shared)
    if mixture.shared_gate:
        found["shared_gate"] = Tensor(f"{at}.{names.shared_gate}", "into")
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
    cell: dict[str, Any] = {
        name: Tensor(single[name], layout)
        for name, layout in _SINGLE.items()
        if name in single
    }
    if not getattr(config, "lower_bound", False):
        cell.pop("bound", None)
    if "pace" in fused:
        pace = {
            "weight": Tensor("", "into", (fused["pace"],)),
            "bias": Tensor(f"{at}.dt_bias"),
        }
        cell["decay"] = {"pace": pace, "log_rate": Tensor(f"{at}.A_log")}
    if "rate" in fused:
        cell["rate"] = Tensor("", "into", (fused["rate"],))
    found: dict[str, Any] = {
        "query_key": Tensor("", "into", (fused["q"], fused["k"])),
        "value": Tensor("", "into", (fused["v"],)),
        "output": Tensor(single["output"], "out_of"),
    }
    if cell:
        found["cell"] = cell
    if style.conv_width:
        found["filters"] = Tensor("", "taps", (taps["q"], taps["k"]))
    if style.conv_value:
        found["value_filters"] = Tensor("", "taps", (taps["v"],))
    if style.gate != "none":
        found["gate"] = Tensor("", "into", (fused["z"],))
    if style.norm != "none":
        layout = "as_is" if style.norm == "head" else "flat"
        found["norm"] = Tensor(single["norm"], layout)
    if style.conv_bias:
        biases = pieces(names.convolved, "bias", False)
        found["filter_bias"] = Tensor("", "flat", (biases["q"], biases["k"]))
        found["value_bias"] = Tensor("", "flat", (biases["v"],))
    return found
