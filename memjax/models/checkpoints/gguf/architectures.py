"""The architectures of GGUF files that are read, and the names of their tensors."""

from collections.abc import Mapping
from typing import NamedTuple

from memjax.checks import short
from memjax.models.checkpoints.gguf.entries import Entries
from memjax.models.checkpoints.gguf.parts import GGUFParts

# What llama.cpp takes where there is no entry.
THETA = 10_000.0
# Tensors of a layer in GGUF -> in Hugging Face.
ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
}
MLP = {f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
FEED_FORWARD = {
    f"ffn_{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")
}
# Norms come before attention and feed-forward (Llama), after them (OLMo 2), or both
# (Gemma 3).
BEFORE = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
AROUND = AFTER | {
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
}
OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


class Architecture(NamedTuple):
    """Differences between the architectures.

    Attributes:
        model_type: of Hugging Face.
        name: of Hugging Face's class.
        layer: tensors of a layer, their names without ".weight" and ".bias" in the
            file -> Hugging Face's. One of Hugging Face's that several have is all of
            them, row by row in this order.
        whole: the same for names of a layer that change as a whole.
        outside: the same for tensors of no layer, which end in ".weight".
        layers: of Hugging Face, before a layer's number.
        permuted: whether the channels that RoPE rotates together are stored next to
            each other.
        shifted: whether norms are stored with 1 added.
        tiled: whether heads of values go round the heads of keys, not after one
            another for each.
        extra: whether the last layers may predict further tokens, which is not read.
        theta: of RoPE where the file does not say; None must be said, because
            llama.cpp and Hugging Face would take different ones.
    """

    model_type: str
    name: str
    layer: Mapping[str, str] = ATTENTION | MLP | BEFORE
    whole: Mapping[str, str] = {}
    outside: Mapping[str, str] = OUTSIDE
    layers: str = "model.layers"
    permuted: bool = False
    shifted: bool = False
    tiled: bool = False
    extra: bool = False
    theta: float | None = THETA


def _recurrent(mixer: str) -> dict[str, str]:
    """Tensors of a Mamba-2 layer."""
    names = {"in": "in_proj", "conv1d": "conv1d", "norm": "norm", "out": "out_proj"}
    return {f"ssm_{own}": f"{mixer}.{theirs}" for own, theirs in names.items()}


def _rates(mixer: str) -> dict[str, str]:
    names = {"a": "A_log", "d": "D", "dt.bias": "dt_bias"}
    return {f"ssm_{own}": f"{mixer}.{theirs}" for own, theirs in names.items()}


_GATED_DELTANET = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_QWEN35 = Architecture(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    ATTENTION
    | MLP
    | _GATED_DELTANET
    | {"attn_norm": "input_layernorm"}
    | {"post_attention_norm": "post_attention_layernorm"},
    whole=_rates("linear_attn"),
    shifted=True,
    tiled=True,
    extra=True,
    theta=None,
)
_MAMBA2 = Architecture(
    "mamba2",
    "Mamba2ForCausalLM",
    _recurrent("mixer") | {"attn_norm": "norm"},
    whole=_rates("mixer"),
    outside={
        "token_embd": "backbone.embeddings",
        "output_norm": "backbone.norm_f",
        "output": "lm_head",
    },
    layers="backbone.layers",
)
_GRANITE = Architecture(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    ATTENTION
    | BEFORE
    | _recurrent("mamba")
    | {
        "ffn_gate": "shared_mlp.input_linear",
        "ffn_up": "shared_mlp.input_linear",
        "ffn_down": "shared_mlp.output_linear",
    },
    whole=_rates("mamba"),
    permuted=True,
)
# Granite's hybrids have no RoPE; with one a file is Bamba's.
_BAMBA = Architecture(
    "bamba",
    "BambaForCausalLM",
    ATTENTION
    | FEED_FORWARD
    | _recurrent("mamba")
    | {"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"},
    whole=_rates("mamba"),
    outside=OUTSIDE | {"output_norm": "model.final_layernorm"},
    permuted=True,
)
_FALCON_H1 = _BAMBA._replace(
    model_type="falcon_h1",
    name="FalconH1ForCausalLM",
    # llama.cpp gives this norm no ending.
    whole=_rates("mamba") | {"ffn_norm": "pre_ff_layernorm.weight"},
    permuted=False,
    theta=None,
)
# By general.architecture.
ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", permuted=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", permuted=True, theta=None),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", ATTENTION | MLP | AFTER),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        ATTENTION | MLP | AROUND,
        shifted=True,
        theta=None,
    ),
    "qwen35": _QWEN35,
    "mamba2": _MAMBA2,
    "granitehybrid": _GRANITE,
    "falcon-h1": _FALCON_H1,
}


def read_architecture(file: GGUFParts) -> Architecture:
    """The architecture of a file; ValueError with those that are read here."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(
            f"{file.path}: general.architecture={short(name)} is not read, "
            f"expected one of {tuple(ARCHITECTURES)}"
        )
    found = ARCHITECTURES[name]
    # llama.cpp takes this entry as a switch of RoPE.
    if found is _GRANITE and Entries(file).flag("rope.scaling.finetuned", True):
        return _BAMBA
    return found
