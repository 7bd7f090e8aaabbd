"""Names of the tensors of published models with recurrent layers, a row a family.

Recurrent layers join several of our parameters in one matrix; `fused` and `convolved`
say which, in the order of the rows:

    q k v z     queries, keys, values, output gate
    rate pace   β, and Δ of the decay
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

#: Of a feed-forward.
MATRICES = ("gate", "up", "down")
Matrices = tuple[str, ...]
#: Names of the parts of fused matrices and of convolutions, in order.
Parts = Mapping[str, tuple[str, ...]]


class ExpertNames(NamedTuple):
    """Names of a mixture of experts.

    Attributes:
        router: the router's.
        routed: gate, up and down, with {} for an expert's number, or of all experts in
            one tensor; gate and up are one where their names are equal.
        shared: those of the shared expert.
        shared_gate: its gate's.
        router_bias: the router's bias.
    """

    router: str
    routed: Matrices
    shared: Matrices
    shared_gate: str = ""
    router_bias: str = ""


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
        experts: of a layer's mixture of experts.
        one_branch: whether mechanism and feed-forward are layers of their own.
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
    hidden: Matrices = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    mixer: str = "linear_attn"
    attention: str = "self_attn"
    attends: tuple[str, str, str] = ("q_norm", "k_norm", "o_proj")
    root: str = "model"
    embedding: str = "embed_tokens"
    last_norm: str = "norm"
    experts: ExpertNames | None = None
    one_branch: bool = False
    by_key_head: bool = False
    less_one: bool = False


_QWEN_EXPERTS = ExpertNames(
    router="mlp.gate.weight",
    routed=tuple(f"mlp.experts.{{}}.{name}_proj.weight" for name in MATRICES),
    shared=tuple(f"mlp.shared_expert.{name}_proj" for name in MATRICES),
    shared_gate="mlp.shared_expert_gate.weight",
)
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
_QWEN3_NEXT = _QWEN3_5._replace(
    fused={"in_proj_qkvz": ("q", "k", "v", "z"), "in_proj_ba": ("rate", "pace")},
    experts=_QWEN_EXPERTS,
    by_key_head=True,
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
_GATED_DELTANET = _OLMO_HYBRID._replace(
    norms=("attn_norm", "mlp_norm"),
    mixer="attn",
    attention="attn",
    embedding="embeddings",
)
_DELTA_NET = _GATED_DELTANET._replace(
    fused={
        **{f"{part}_proj": (part,) for part in "qkv"},
        "g_proj": ("z",),
        "b_proj": ("rate",),
    },
)
_RETNET = _DELTA_NET._replace(
    fused={**{f"{part}_proj": (part,) for part in "qkv"}, "g_proj": ("z",)},
    convolved={},
    single={"norm": "g_norm_swish_gate.weight", "output": "o_proj.weight"},
)
_GLA = _RETNET._replace(
    single={
        **_RETNET.single,
        "narrow": "gk_proj.0.weight",
        "widen": "gk_proj.1.weight",
        "bias": "gk_proj.1.bias",
    }
)
_OF_ALL_HEADS = {"norm": "g_norm.weight", "output": "o_proj.weight"}
_GSA = _RETNET._replace(single=_OF_ALL_HEADS | {"forget": "f_proj.weight"})
_HGRN2 = _RETNET._replace(
    fused={"q_proj": ("q",), "f_proj": ("k",), "i_proj": ("v",)},
    # Made of the bounds of all layers; see `fla.bounds`.
    single=_OF_ALL_HEADS | {"bound": "lower_bound"},
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
_GRANITE_HIDDEN = (
    "shared_mlp.input_linear",
    "shared_mlp.input_linear",
    "shared_mlp.output_linear",
)
_GRANITE = _MAMBA2._replace(
    norms=("input_layernorm", "post_attention_layernorm"),
    hidden=_GRANITE_HIDDEN,
    experts=ExpertNames(
        router="block_sparse_moe.router.layer.weight",
        routed=(
            "block_sparse_moe.input_linear.weight",
            "block_sparse_moe.input_linear.weight",
            "block_sparse_moe.output_linear.weight",
        ),
        shared=_GRANITE_HIDDEN,
    ),
    mixer="mamba",
    root="model",
    embedding="embed_tokens",
    last_norm="norm",
)
_NEMOTRON_H = _MAMBA2._replace(
    hidden=tuple(f"mixer.{name}_proj" for name in MATRICES),
    attention="mixer",
    experts=ExpertNames(
        router="mixer.gate.weight",
        routed=tuple(f"mixer.experts.{{}}.{name}_proj.weight" for name in MATRICES),
        shared=tuple(f"mixer.shared_experts.{name}_proj" for name in MATRICES),
        router_bias="mixer.gate.e_score_correction_bias",
    ),
    one_branch=True,
)
_BAMBA = _GRANITE._replace(
    norms=("input_layernorm", "pre_ff_layernorm"),
    hidden=tuple(f"feed_forward.{name}_proj" for name in MATRICES),
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
#: By `model_type`.
HYBRIDS = {
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5._replace(experts=_QWEN_EXPERTS),
    "qwen3_next": _QWEN3_NEXT,
    "nemotron_h": _NEMOTRON_H,
    "olmo_hybrid": _OLMO_HYBRID,
    "mamba2": _MAMBA2,
    "granitemoehybrid": _GRANITE,
    "bamba": _BAMBA,
    "falcon_h1": _BAMBA,
    "gated_deltanet": _GATED_DELTANET,
    "delta_net": _DELTA_NET,
    "gla": _GLA,
    "gsa": _GSA,
    "retnet": _RETNET,
    "hgrn2": _HGRN2,
    "lfm2": _LFM2,
    "mamba": _MAMBA2,
    "falcon_mamba": _MAMBA2,
    "recurrent_gemma": _RECURRENT_GEMMA,
}
