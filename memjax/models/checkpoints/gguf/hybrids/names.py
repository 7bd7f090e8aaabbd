"""Names of the tensors of models with recurrent layers in GGUF files."""

from memjax.models.checkpoints.gguf.architecture import (
    ATTENTION,
    BEFORE,
    MLP,
    OUTSIDE,
    Architecture,
)
from memjax.models.checkpoints.gguf.entries import Entries

_FEED_FORWARD = {
    f"ffn_{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")
}
_BACKBONE = OUTSIDE | {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
}


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
_QWEN_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
} | {
    f"ffn_{name}_{own}": f"mlp.{theirs}.{name}_proj"
    for own, theirs in {"exps": "experts.{}", "shexp": "shared_expert"}.items()
    for name in ("gate", "up", "down")
}
_QWEN35_MOE = _QWEN35._replace(
    model_type="qwen3_5_moe_text",
    name="Qwen3_5MoeForCausalLM",
    layer={k: v for k, v in _QWEN35.layer.items() if k not in MLP} | _QWEN_EXPERTS,
    experts=True,
)
_QWEN3_NEXT = _QWEN35_MOE._replace(
    model_type="qwen3_next",
    name="Qwen3NextForCausalLM",
    layer={
        k: v for k, v in _QWEN35_MOE.layer.items() if k not in ("ssm_alpha", "ssm_beta")
    }
    | {
        "attn_qkv": "linear_attn.in_proj_qkvz",
        "attn_gate": "linear_attn.in_proj_qkvz",
        "ssm_ba": "linear_attn.in_proj_ba",
    },
    tiled=False,
    extra=False,
)
_MAMBA = Architecture(
    "mamba",
    "MambaForCausalLM",
    _recurrent("mixer")
    | {"attn_norm": "norm", "ssm_x": "mixer.x_proj", "ssm_dt": "mixer.dt_proj"},
    whole={"ssm_a": "mixer.A_log", "ssm_d": "mixer.D"},
    outside=_BACKBONE,
    layers="backbone.layers",
)
_FALCON_MAMBA = _MAMBA._replace(
    model_type="falcon_mamba", name="FalconMambaForCausalLM"
)
_LFM2 = Architecture(
    "lfm2",
    "Lfm2ForCausalLM",
    ATTENTION
    | {
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "attn_output": "self_attn.out_proj",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
    }
    | {f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
    # llama.cpp's name, though it is the last norm.
    outside=OUTSIDE | {"token_embd_norm": "model.embedding_norm"},
    theta=None,
)
_MAMBA2 = Architecture(
    "mamba2",
    "Mamba2ForCausalLM",
    _recurrent("mixer") | {"attn_norm": "norm"},
    whole=_rates("mixer"),
    outside=_BACKBONE,
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
_GRANITE_MOE = _GRANITE._replace(
    layer={k: v for k, v in _GRANITE.layer.items() if k not in MLP}
    | {
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_gate_exps": "block_sparse_moe.input_linear",
        "ffn_up_exps": "block_sparse_moe.input_linear",
        "ffn_down_exps": "block_sparse_moe.output_linear",
        "ffn_gate_shexp": "shared_mlp.input_linear",
        "ffn_up_shexp": "shared_mlp.input_linear",
        "ffn_down_shexp": "shared_mlp.output_linear",
    },
    experts=True,
)
# Granite's hybrids have no RoPE; with one a file is Bamba's.
_BAMBA = Architecture(
    "bamba",
    "BambaForCausalLM",
    ATTENTION
    | _FEED_FORWARD
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
# Each layer has one branch, of `mixer`.
_NEMOTRON_H = _MAMBA2._replace(
    model_type="nemotron_h",
    name="NemotronHForCausalLM",
    layer={
        **_MAMBA2.layer,
        "attn_q": "mixer.q_proj",
        "attn_k": "mixer.k_proj",
        "attn_v": "mixer.v_proj",
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
    },
    permuted=True,
)
_NEMOTRON_H_MOE = _NEMOTRON_H._replace(
    layer={
        **_NEMOTRON_H.layer,
        "ffn_gate_inp": "mixer.gate",
        "ffn_up_exps": "mixer.experts.{}.up_proj",
        "ffn_down_exps": "mixer.experts.{}.down_proj",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
    },
    whole={
        **_NEMOTRON_H.whole,
        "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    },
    experts=True,
    extra=True,
)
#: By general.architecture.
HYBRIDS = {
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35_MOE,
    "qwen3next": _QWEN3_NEXT,
    "mamba": _MAMBA,
    "mamba2": _MAMBA2,
    "lfm2": _LFM2,
    "granitehybrid": _GRANITE,
    "falcon-h1": _FALCON_H1,
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H_MOE,
}


def variant(found: Architecture, entry: Entries) -> Architecture:
    """The model that a file of an architecture has, where there are several."""
    if found is _MAMBA and entry.flag("ssm.dt_b_c_rms", False):
        return _FALCON_MAMBA
    if found is _GRANITE:
        # llama.cpp takes this entry as a switch of RoPE.
        if entry.flag("rope.scaling.finetuned", True):
            return _BAMBA
        return _GRANITE_MOE if entry.find("expert_count", 0) else _GRANITE
    return found
