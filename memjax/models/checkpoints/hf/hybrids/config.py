"""Reads `config.json` of published models with recurrent layers.

`READ` has a function for each family; those of LFM2, Mamba, RecurrentGemma and
flash-linear-attention are in `scans` and `fla`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from memjax.checks import check_positive, short
from memjax.mechanisms import ParallelConfig
from memjax.models.checkpoints.hf.fields import (
    read_entry,
    read_layers,
    read_size,
    require_value,
)
from memjax.models.checkpoints.hf.hybrids.fla.layers import FLA
from memjax.models.checkpoints.hf.hybrids.layers import (
    FULL,
    LINEAR,
    RENAMED,
    layer_kinds,
    model_of_layers,
)
from memjax.models.checkpoints.hf.hybrids.mixers import (
    floats,
    full_attention,
    gated_deltanet,
    mamba2,
    mamba_of_layer,
    read_epsilon,
    require_silu,
)
from memjax.models.checkpoints.hf.hybrids.mixtures import (
    granite_experts,
    nemotron_experts,
    qwen_experts,
)
from memjax.models.checkpoints.hf.hybrids.scans import (
    from_falcon_mamba,
    from_lfm2,
    from_mamba,
    from_recurrent_gemma,
)
from memjax.models.language_model.config import BlockStyle, Dtype, ModelConfig

# Of OLMo Hybrid's norm behind the memory, whatever the file's others are.
OLMO_EPSILON = 1e-5
Read = Callable[[Mapping[str, Any], Dtype], ModelConfig]


def from_qwen3_5(
    config: Mapping[str, Any], dtype: Dtype, *, styles: Sequence[BlockStyle] = ()
) -> ModelConfig:
    """Gated DeltaNet three layers in four; the fourth attends, with a gate."""
    interval = read_size(config, "full_attention_interval", 4)
    kinds = layer_kinds(config, lambda i: FULL if (i + 1) % interval == 0 else LINEAR)
    require_silu(config)
    epsilon = read_epsilon(config)
    attention = full_attention(
        config,
        head_dim=read_size(config, "head_dim", 256),
        kv_heads=read_size(config, "num_key_value_heads"),
        qk_norm="head",
        qk_norm_epsilon=epsilon,
        output_gate=True,
        partial=0.25,
    )
    mechanisms = {FULL: attention, LINEAR: gated_deltanet(config, epsilon)}
    return model_of_layers(
        config,
        [mechanisms[kind] for kind in kinds],
        dtype,
        styles=styles,
        # Of no effect where all layers have experts.
        hidden=1 if styles and all(style.experts for style in styles) else None,
    )


def from_qwen3_moe(config: Mapping[str, Any], dtype: Dtype) -> ModelConfig:
    """Qwen3.5 and Qwen3-Next with experts in some or all layers."""
    experts = qwen_experts(config)
    dense = read_entry(config, "mlp_only_layers", list, [])
    step = read_size(config, "decoder_sparse_step", 1)
    styles = [
        BlockStyle(experts=None if i in dense or (i + 1) % step else experts)
        for i in range(read_layers(config))
    ]
    return from_qwen3_5(config, dtype, styles=styles)


def from_olmo_hybrid(config: Mapping[str, Any], dtype: Dtype) -> ModelConfig:
    """Gated DeltaNet with β to 2; attention has norms of its outputs, as OLMo 2 has."""
    kinds = layer_kinds(config, lambda i: FULL if i % 4 == 3 else LINEAR)
    require_silu(config)
    # The released model's is null. Without an entry, as in transformers, a default.
    record = read_entry(config, "rope_parameters", dict, {})
    place = record if "rope_theta" in record else config
    attention = full_attention(
        config,
        qk_norm="width",
        qk_norm_epsilon=read_epsilon(config),
        rope=place.get("rope_theta", 0) is not None,
    )
    negative = read_entry(config, "linear_allow_neg_eigval", bool, True)
    heads = read_size(config, "num_attention_heads")
    width = int(0.75 * read_size(config, "hidden_size") / heads)
    memory = gated_deltanet(
        config,
        OLMO_EPSILON,
        2.0 if negative else 1.0,
        heads=heads,
        key_dim=read_size(config, "linear_key_head_dim", width),
    )
    mechanisms = {FULL: attention, LINEAR: memory}
    styles = {
        FULL: BlockStyle(norm_first=False, norm_outputs=True),
        LINEAR: BlockStyle(),
    }
    return model_of_layers(
        config,
        [mechanisms[kind] for kind in kinds],
        dtype,
        styles=[styles[kind] for kind in kinds],
    )


def from_mamba2(config: Mapping[str, Any], dtype: Dtype) -> ModelConfig:
    """Mamba-2 alone, without a feed-forward."""
    require_silu(config)
    require_value(config, "use_bias", False, default=False)
    memory = mamba2(
        config,
        heads=read_size(config, "num_heads"),
        width=read_size(config, "head_dim"),
        state=read_size(config, "state_size", 128),
        groups=read_size(config, "n_groups", 8),
        taps=read_size(config, "conv_kernel", 4),
        bias=read_entry(config, "use_conv_bias", bool, True),
        epsilon=read_entry(config, "layer_norm_epsilon", float, 1e-5),
    )
    return model_of_layers(
        config,
        [memory] * read_layers(config),
        dtype,
        hidden=1,
        epsilon=read_entry(config, "layer_norm_epsilon", float, 1e-5),
        feed_forward="none",
    )


def from_granite(config: Mapping[str, Any], dtype: Dtype) -> ModelConfig:
    """Mamba-2 with a feed-forward, and a few attention layers, by multipliers."""
    experts = granite_experts(config)
    layers = read_layers(config)
    require_silu(config)
    positions = read_entry(config, "position_embedding_type", str, "nope")
    attention = full_attention(
        config,
        query_scale=read_entry(config, "attention_multiplier", float, 1.0),
        rope=positions == "rope",
    )
    mechanisms = {FULL: attention, LINEAR: mamba_of_layer(config)}
    kinds = layer_kinds(config, lambda i: LINEAR)
    scaling = read_entry(config, "logits_scaling", float, 1.0)
    check_positive(logits_scaling=scaling)
    return model_of_layers(
        config,
        [mechanisms[kind] for kind in kinds],
        dtype,
        styles=[BlockStyle(experts=experts)] * layers if experts else (),
        hidden=read_size(config, "shared_intermediate_size"),
        embedding_multiplier=read_entry(config, "embedding_multiplier", float, 1.0),
        residual_multiplier=read_entry(config, "residual_multiplier", float, 1.0),
        logits_multiplier=1 / scaling,
    )


def from_bamba(config: Mapping[str, Any], dtype: Dtype) -> ModelConfig:
    """Mamba-2 with a feed-forward, and attention that turns half of a head."""
    require_silu(config)
    require_value(config, "mlp_bias", False, default=False)
    attends = read_entry(config, "attn_layer_indices", list, [])
    kv_heads = read_size(config, "num_key_value_heads")
    attention = full_attention(config, kv_heads=kv_heads, partial=0.5)
    memory = mamba_of_layer(config)
    layers = range(read_layers(config))
    return model_of_layers(
        config,
        [attention if i in attends else memory for i in layers],
        dtype,
    )


def from_falcon_h1(config: Mapping[str, Any], dtype: Dtype) -> ModelConfig:
    """Attention and Mamba-2 side by side in every layer, by many multipliers."""
    require_silu(config)
    # Biases of queries and keys would not have the multipliers of their inputs.
    for key in ("mlp_bias", "projectors_bias", "attention_bias"):
        require_value(config, key, False, default=False)

    def factor(key):
        return read_entry(config, key, float, 1.0)

    inside, outside = factor("attention_in_multiplier"), factor("ssm_in_multiplier")
    gate, value, key, query, pace = (
        outside * part for part in floats(config, "ssm_multipliers", 5)
    )
    kv_heads = read_size(config, "num_key_value_heads")
    attention = full_attention(config, kv_heads=kv_heads)
    # Scores have the multipliers of queries and keys, reads those of values.
    scale = attention.head_dim**-0.5 * inside**2 * factor("key_multiplier")
    normed = read_entry(config, "mamba_rms_norm", bool, False)
    first = not read_entry(config, "mamba_norm_before_gate", bool, True)
    memory = mamba_of_layer(
        config,
        inner=_inner(config),
        norm="group" if normed else "none",
        gate_first=first and normed,
        gate_multiplier=gate,
        value_multiplier=value,
        key_multiplier=key,
        query_multiplier=query,
        cell_multiplier=pace,
    )
    both = ParallelConfig(
        dataclasses.replace(attention, query_scale=scale),
        memory,
        attention_multiplier=inside * factor("attention_out_multiplier"),
        memory_multiplier=factor("ssm_out_multiplier"),
    )
    return model_of_layers(
        config,
        [both] * read_layers(config),
        dtype,
        embedding_multiplier=factor("embedding_multiplier"),
        logits_multiplier=factor("lm_head_multiplier"),
        feed_forward_multipliers=floats(config, "mlp_multipliers", 2),
    )


def from_nemotron_h(config: Mapping[str, Any], dtype: Dtype) -> ModelConfig:
    """Layers of one branch: Mamba-2, attention without positions, or a feed-forward.

    A feed-forward and the layer before it are one of ours.
    """
    for key in ("use_bias", "mlp_bias", "mamba_proj_bias"):
        require_value(config, key, False, default=False)
    require_value(config, "mlp_hidden_act", "relu2", default="relu2")
    require_value(config, "mamba_hidden_act", "silu", default="silu")
    epsilon = read_entry(config, "layer_norm_epsilon", float, 1e-5)
    memory = mamba2(
        config,
        heads=read_size(config, "mamba_num_heads"),
        width=read_size(config, "mamba_head_dim"),
        state=read_size(config, "ssm_state_size", 128),
        groups=read_size(config, "n_groups", 8),
        taps=read_size(config, "conv_kernel", 4),
        bias=read_entry(config, "use_conv_bias", bool, True),
        epsilon=epsilon,
    )
    kv_heads = read_size(config, "num_key_value_heads")
    attention = full_attention(config, kv_heads=kv_heads, rope=False)
    mixers = {LINEAR: memory, FULL: attention}
    hidden = {
        "mlp": BlockStyle(feed_forward="relu2"),
        "moe": BlockStyle(feed_forward="relu2", experts=nemotron_experts(config)),
    }
    mechanisms, styles = [], []
    for i, kind in enumerate(_branches(config)):
        if kind in mixers:
            mechanisms.append(mixers[kind])
            styles.append(BlockStyle(feed_forward="none"))
        elif kind in hidden and styles and styles[-1].feed_forward == "none":
            if kind == "moe" and hidden[kind].experts is None:
                raise ValueError("n_routed_experts is missing from config.json")
            styles[-1] = hidden[kind]
        else:
            raise ValueError(
                f"layers_block_type[{i}] must be a memory, attention, or a "
                f"feed-forward behind one of them, got {short(kind)}"
            )
    return model_of_layers(
        config,
        mechanisms,
        dtype,
        styles=styles,
        hidden=read_size(config, "intermediate_size"),
        epsilon=epsilon,
    )


def _branches(config: Mapping[str, Any]) -> list[Any]:
    """The kind of each layer of one branch, from a list or a pattern of letters."""
    letters = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
    pattern = read_entry(config, "hybrid_override_pattern", str, "")
    given = read_entry(config, "layers_block_type", list, list(pattern))
    if not given:
        raise ValueError("layers_block_type is missing from config.json")
    layers = read_size(config, "num_hidden_layers", len(given))
    if len(given) != layers:
        raise ValueError(
            f"layers_block_type must name {layers} layers, got {len(given)}: "
            f"{short(given)}"
        )
    names = RENAMED | letters
    return [names.get(kind, kind) if isinstance(kind, str) else kind for kind in given]


def _inner(config: Mapping[str, Any]) -> int | None:
    """Channels of Falcon-H1's memory; null is as many as `mamba_expand` says."""
    if "mamba_d_ssm" not in config:
        raise ValueError("mamba_d_ssm is missing from config.json")
    return read_size(config, "mamba_d_ssm", 0) or None


#: By `model_type`.
READ: dict[str, Read] = {
    "qwen3_5_text": from_qwen3_5,
    "qwen3_5_moe_text": from_qwen3_moe,
    "qwen3_next": from_qwen3_moe,
    "nemotron_h": from_nemotron_h,
    "olmo_hybrid": from_olmo_hybrid,
    "mamba2": from_mamba2,
    "granitemoehybrid": from_granite,
    "bamba": from_bamba,
    "falcon_h1": from_falcon_h1,
    "lfm2": from_lfm2,
    "mamba": from_mamba,
    "falcon_mamba": from_falcon_mamba,
    "recurrent_gemma": from_recurrent_gemma,
} | FLA
