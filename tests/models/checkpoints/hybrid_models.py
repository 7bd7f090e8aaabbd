"""transformers' models with recurrent layers, tiny and random, and their numbers.

Key heads are fewer than value heads, widths of keys and values differ, every multiplier
is other than 1, and so are the choices that would not show at their defaults. There is
a layer of each kind and no more: a layer is most of what a family costs to compile.
"""

from typing import Any

import numpy as np
import torch
import transformers

IDS: dict[str, Any] = dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)
ROPE: dict[str, Any] = dict(rope_type="default", rope_theta=1000.0)
MODEL = IDS | dict(vocab_size=48, hidden_size=24, num_hidden_layers=2)
KINDS = ["linear_attention", "full_attention"]
ATTENTION = MODEL | dict(
    intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-3,
    max_position_embeddings=256,
)
DELTA = ATTENTION | dict(
    linear_key_head_dim=6,
    linear_value_head_dim=10,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    layer_types=KINDS,
)
QWEN = DELTA | dict(
    head_dim=16, rope_parameters=ROPE | dict(partial_rotary_factor=0.25)
)
EXPERTS = dict(
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    shared_expert_intermediate_size=20,
    norm_topk_prob=True,
)
MAMBA = ATTENTION | dict(
    mamba_n_heads=4,
    mamba_d_head=12,
    mamba_n_groups=2,
    mamba_d_state=10,
    mamba_expand=2,
    mamba_chunk_size=8,
)
FALCON = dict(
    mamba_d_ssm=48,
    rope_parameters=ROPE,
    lm_head_multiplier=0.7,
    embedding_multiplier=2.5,
    mlp_multipliers=[0.8, 1.3],
    key_multiplier=0.6,
    attention_out_multiplier=0.9,
    attention_in_multiplier=1.2,
    ssm_multipliers=[0.7, 1.1, 0.9, 1.3, 0.8],
    ssm_in_multiplier=1.4,
    ssm_out_multiplier=0.75,
)
GRANITE = MAMBA | dict(
    num_local_experts=0,
    num_experts_per_tok=0,
    shared_intermediate_size=40,
    layer_types=KINDS,
    embedding_multiplier=3.0,
    logits_scaling=1.7,
    residual_multiplier=0.4,
    attention_multiplier=0.2,
)
SCAN = MODEL | dict(state_size=6, layer_norm_epsilon=1e-3, time_step_rank=5)
#: Family and variant -> model_type and sizes.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", QWEN),
    "olmo_hybrid": ("olmo_hybrid", DELTA | dict(rope_parameters=dict(rope_theta=None))),
    "olmo_hybrid_rope": ("olmo_hybrid", DELTA | dict(rope_parameters=ROPE)),
    "mamba2": (
        "mamba2",
        MODEL
        | dict(num_heads=4, head_dim=12, state_size=10, n_groups=2, chunk_size=8)
        # The limit above alone: transformers' steps have none at all.
        | dict(layer_norm_epsilon=1e-3),
    ),
    "mamba2_limits": (
        "mamba2",
        MODEL
        | dict(num_heads=4, head_dim=12, state_size=10, n_groups=2, chunk_size=8)
        | dict(layer_norm_epsilon=1e-3, num_hidden_layers=1, use_conv_bias=False)
        | dict(time_step_limit=(0.02, 1.5)),
    ),
    "granite": ("granitemoehybrid", GRANITE),
    "granite_rope": (
        "granitemoehybrid",
        GRANITE | dict(position_embedding_type="rope", rope_parameters=ROPE),
    ),
    "bamba": (
        "bamba",
        MAMBA
        | dict(num_attention_heads=3, num_key_value_heads=1, attn_layer_indices=[1])
        | dict(rope_parameters=ROPE | dict(partial_rotary_factor=0.5)),
    ),
    "falcon_h1": ("falcon_h1", MAMBA | FALCON | dict(mamba_rms_norm=False)),
    "falcon_h1_norm": (
        "falcon_h1",
        MAMBA
        | FALCON
        | dict(mamba_rms_norm=True, mamba_norm_before_gate=True, num_hidden_layers=1),
    ),
    "falcon_h1_gate": (
        "falcon_h1",
        MAMBA
        | FALCON
        | dict(mamba_rms_norm=True, mamba_norm_before_gate=False, num_hidden_layers=1),
    ),
    "qwen3_next": ("qwen3_next", QWEN | EXPERTS | dict(mlp_only_layers=[1])),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {key: size for key, size in QWEN.items() if key != "intermediate_size"}
        | EXPERTS,
    ),
    "granite_moe": (
        "granitemoehybrid",
        GRANITE
        | dict(num_local_experts=6, num_experts_per_tok=2, intermediate_size=12)
        | dict(shared_intermediate_size=20),
    ),
    "nemotron_h": (
        "nemotron_h",
        MODEL
        | dict(intermediate_size=40, num_attention_heads=4, num_key_value_heads=2)
        | dict(head_dim=8, layer_norm_epsilon=1e-3, mamba_num_heads=4)
        | dict(mamba_head_dim=12, ssm_state_size=10, n_groups=2, chunk_size=8)
        # transformers has the least step when it reads and not when it draws.
        | dict(time_step_min=1e-9, n_routed_experts=6, num_experts_per_tok=2)
        | dict(moe_intermediate_size=12, moe_shared_expert_intermediate_size=20)
        | dict(n_group=3, topk_group=2, routed_scaling_factor=1.3, n_shared_experts=2)
        | dict(layers_block_type=["linear_attention", "mlp", "full_attention", "moe"])
        | dict(num_hidden_layers=4),
    ),
    "lfm2": (
        "lfm2",
        ATTENTION
        | dict(intermediate_size=48, norm_eps=1e-3, block_multiple_of=8)
        | dict(rope_parameters=ROPE)
        | dict(layer_types=["conv", "full_attention"]),
    ),
    "mamba": ("mamba", SCAN | dict(use_bias=True)),
    "mamba_plain": (
        "mamba",
        SCAN
        | dict(use_conv_bias=False, time_step_rank="auto")
        | dict(num_hidden_layers=1),
    ),
    "falcon_mamba": ("falcon_mamba", SCAN | dict(mixer_rms_eps=1e-2)),
    "recurrent_gemma": (
        "recurrent_gemma",
        MODEL
        | dict(lru_width=48, intermediate_size=80, num_attention_heads=3)
        | dict(num_key_value_heads=1, attention_window_size=5, rms_norm_eps=1e-3)
        | dict(num_hidden_layers=3)
        | dict(logits_soft_cap=4.0)
        | dict(rope_parameters=ROPE | dict(partial_rotary_factor=0.5)),
    ),
}


#: Parts of one length, which one program reads.
CUTS = (7, 14)


def build(family: str, tied: bool):
    """The model of transformers, all of whose parameters are random."""
    model_type, sizes = FAMILIES[family]
    sizes = sizes | dict(tie_word_embeddings=tied)
    kind: Any = transformers.CONFIG_MAPPING[model_type]
    made = kind(**sizes)
    made._attn_implementation = "eager"
    torch.manual_seed(len(family))
    model = transformers.AutoModelForCausalLM.from_config(made).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_drawn(name, parameter, model_type, tied))
    return model


def _drawn(name, parameter, model_type, tied):
    leaf, noise = name.split(".")[-1], torch.randn_like(parameter)
    if leaf in ("A_log", "recurrent_param"):
        return noise * 0.5
    if leaf == "dt_bias" or name.endswith("dt_proj.bias"):
        return noise - 1
    if "conv" in name and leaf == "weight":
        # So small in one layer that the epsilons of norms count.
        small = "layers.0." in name and "linear_attn" in name
        return noise * (1e-3 if small else 0.5)
    if leaf == "D" or parameter.ndim == 1:
        # Norms that are stored with 1 taken from them.
        less_one = "qwen3" in model_type or model_type == "recurrent_gemma"
        own = "linear_attn.norm" in name
        return (0.0 if leaf == "bias" or less_one and not own else 1.0) + 0.3 * noise
    if "embed" in name:
        return noise * (0.3 if tied else 1.0)
    return noise * 1.5 * parameter.shape[-1] ** -0.5


@torch.no_grad()
def numbers(model) -> dict[str, np.ndarray]:
    """Tokens, logits, what follows, and states; see `hybrid_reading`."""
    torch.manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (2, 21))
    found = {"tokens": tokens, "logits": model(tokens, use_cache=False).logits}
    for count in CUTS:
        out = model(tokens[:, :count], use_cache=True)
        names = ("past_key_values", "cache_params")
        caches = [cache for name in names if (cache := getattr(out, name, None))]
        # RecurrentGemma's modules keep theirs to themselves.
        for i, layer in enumerate(caches[0].layers if caches else ()):
            for ours, theirs in (
                ("conv", "conv_states"),
                ("memory", "recurrent_states"),
            ):
                state = getattr(layer, theirs, None)
                if state is not None and state[0] is not None:
                    found[f"state{count}.{i}.{ours}"] = state[0][:1].float()
    # All is read again for each token: no cache that could be wrong.
    grown = tokens[:1]
    for _ in range(16):
        best = model(grown, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        grown = torch.cat([grown, best], 1)
    found["generated"] = grown[:, tokens.shape[1] :]
    return {name: value.numpy().copy() for name, value in found.items()}
