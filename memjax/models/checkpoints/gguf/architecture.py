"""Architectures of GGUF files: their differences, and names of their tensors."""

from collections.abc import Mapping
from typing import NamedTuple

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
        experts: whether feed-forwards are mixtures of experts; {} in a name is the
            number of one.
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
    experts: bool = False
    extra: bool = False
    theta: float | None = THETA
