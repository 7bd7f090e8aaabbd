"""Writes Hugging Face's `config.json` of a model that one of its families describes."""

import dataclasses
from typing import Any

from memjax.mechanisms.layers.heads import HeadsConfig
from memjax.models.checkpoints.hf.config import (
    FULL,
    LAYER_NORM_EPSILON,
    SLIDING,
    Family,
    Layer,
)
from memjax.models.checkpoints.hf.fields import rope_scaling_record
from memjax.models.checkpoints.hf.hybrids.entries import POSITIONS
from memjax.models.checkpoints.hf.hybrids.export import to_hybrid_config
from memjax.models.checkpoints.hf.hybrids.family import hybrid_family
from memjax.models.language_model.config import ModelConfig, kinds


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` from which transformers builds the same function.

    A tied head with a scaled embedding becomes an untied one but in Gemma: transformers
    does not scale embeddings, so `tensors_from_parameters` gives the head a matrix of
    its own.

    Raises:
        ValueError: if no family has the model's mechanisms, norms, biases or positions.
    """
    if family := hybrid_family(config):
        return to_hybrid_config(config, family)
    heads, layers = _heads(config), _layers(config)
    common = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": heads.num_heads,
        "tie_word_embeddings": tied_in_file(config),
    }
    style = config.architecture
    if style.norm == "layer":
        return _to_opt(config, heads, layers) | common
    common |= _decoder(config, heads)
    if is_gemma(config):
        return common | _to_gemma(config, heads, layers)
    _same_rope([layer for layer in layers if layer.theta is not None])
    if style.norm_outputs:
        return common | _to_olmo2(config, heads, layers)
    _expressible(config, norm_first=True)
    if heads.qk_norm != "none":
        return common | _to_qwen3(config, heads, layers)
    if any(layer.theta is None for layer in layers):
        return common | _to_smollm3(config, heads, layers)
    return common | _to_llama(config, heads, layers)


def tied_in_file(config: ModelConfig) -> bool:
    """Whether Hugging Face's model has one tensor as both embedding and head."""
    # A scaled embedding is another matrix than the head, but where its class scales.
    scaled = config.architecture.scale_embedding and not is_gemma(config)
    return config.tied_head and not scaled


def is_gemma(config: ModelConfig) -> bool:
    """Whether norms and feed-forward are Gemma 3's."""
    style = config.architecture
    around = style.norm_first and style.norm_outputs
    return around and style.norm == "rms" and style.feed_forward == "geglu"


def _decoder(config: ModelConfig, heads: HeadsConfig) -> dict[str, Any]:
    """The entries of all families but OPT."""
    gelu = is_gemma(config)
    _expressible(
        config,
        feed_forward="geglu" if gelu else "swiglu",
        learned_positions=0,
        embedding_dim=None,
    )
    if config.model_dim % heads.num_heads:
        raise ValueError(
            f"num_heads must divide model_dim={config.model_dim} in transformers, "
            f"got {heads.num_heads}"
        )
    rope = next((layer for layer in _layers(config) if layer.theta), None)
    if rope is None:
        raise ValueError("rope_theta must be a number in Llama's families, got None")
    if not gelu and heads.query_scale is not None:
        raise ValueError(
            f"query_scale must be None but in Gemma 3, got {heads.query_scale}"
        )
    epsilon = config.norm_epsilon
    if heads.qk_norm != "none" and heads.qk_norm_epsilon != epsilon:
        raise ValueError(
            f"qk_norm_epsilon must be norm_epsilon={epsilon} in a published family, "
            f"got {heads.qk_norm_epsilon}"
        )
    return {
        "intermediate_size": config.hidden_dim,
        "num_key_value_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.capacity or POSITIONS,
        "rms_norm_eps": epsilon,
        "rope_theta": rope.theta,
        "rope_scaling": rope_scaling_record(rope.scaling),
    }


def _to_llama(
    config: ModelConfig, heads: HeadsConfig, layers: list[Layer]
) -> dict[str, Any]:
    """Llama, Qwen2 or Mistral, by their biases and windows."""
    hidden_bias = config.architecture.feed_forward_bias
    sliding = any(layer.window for layer in layers)
    # Llama has one switch for all four biases of attention, and no window.
    if heads.qkv_bias == heads.output_bias and not sliding:
        biases = {"attention_bias": heads.qkv_bias, "mlp_bias": hidden_bias}
        return _named("llama", "LlamaForCausalLM") | biases
    if heads.output_bias:
        raise ValueError("output_bias must be False in the family, got True")
    _expressible(config, feed_forward_bias=False)
    if heads.qkv_bias:
        return _named("qwen2", "Qwen2ForCausalLM") | _qwen_windows(config, layers)
    if not all(layer.window for layer in layers):
        raise ValueError(
            "mechanisms must all be alike without qkv_bias: only Qwen2 mixes attention "
            f"and sliding windows, got {kinds(config)}"
        )
    window = {"sliding_window": config.window}
    return _named("mistral", "MistralForCausalLM") | window


def _to_qwen3(
    config: ModelConfig, heads: HeadsConfig, layers: list[Layer]
) -> dict[str, Any]:
    _expressible(config, feed_forward_bias=False)
    _alike("qk_norm", heads.qk_norm, "head")
    _alike("output_bias", heads.output_bias, heads.qkv_bias)
    _alike("rope_theta=None in mechanisms", any(not x.theta for x in layers), False)
    bias = {"attention_bias": heads.qkv_bias}
    named = _named("qwen3", "Qwen3ForCausalLM")
    return named | bias | _qwen_windows(config, layers)


def _to_smollm3(
    config: ModelConfig, heads: HeadsConfig, layers: list[Layer]
) -> dict[str, Any]:
    _alike("output_bias", heads.output_bias, heads.qkv_bias)
    sliding = any(layer.window for layer in layers)
    return _named("smollm3", "SmolLM3ForCausalLM") | {
        "attention_bias": heads.qkv_bias,
        "mlp_bias": config.architecture.feed_forward_bias,
        "no_rope_layers": [int(layer.theta is not None) for layer in layers],
        "use_sliding_window": sliding,
        "sliding_window": config.window if sliding else None,
        "layer_types": _layer_types(layers),
    }


def _to_olmo2(
    config: ModelConfig, heads: HeadsConfig, layers: list[Layer]
) -> dict[str, Any]:
    _expressible(config, norm_first=False, feed_forward_bias=False)
    for name, found, expected in (
        ("qk_norm", heads.qk_norm, "width"),
        ("output_bias", heads.output_bias, heads.qkv_bias),
        ("num_heads * head_dim", heads.num_heads * heads.head_dim, config.model_dim),
        ("rope_theta=None in mechanisms", any(not x.theta for x in layers), False),
        ("sliding windows in mechanisms", any(x.window for x in layers), False),
    ):
        _alike(name, found, expected)
    named = _named("olmo2", "Olmo2ForCausalLM")
    return named | {"attention_bias": heads.qkv_bias}


def _to_gemma(
    config: ModelConfig, heads: HeadsConfig, layers: list[Layer]
) -> dict[str, Any]:
    _expressible(config, scale_embedding=True, feed_forward_bias=False)
    _alike("qk_norm", heads.qk_norm, "head")
    _alike("output_bias", heads.output_bias, heads.qkv_bias)
    _alike("tied_head", config.tied_head, True)
    _alike("rope_theta=None in mechanisms", any(not x.theta for x in layers), False)
    local = _same_rope([layer for layer in layers if layer.window])
    full = _same_rope([layer for layer in layers if not layer.window])
    if local is not None and local.scaling is not None:
        raise ValueError(
            "rope_scaling of sliding windows must be None in Gemma 3, got "
            f"{local.scaling}"
        )
    scalar = heads.head_dim if heads.query_scale is None else heads.query_scale**-2
    if abs(scalar - round(scalar)) > 1e-6:
        raise ValueError(
            "query_scale must be the inverse root of a whole number in Gemma 3, got "
            f"{heads.query_scale}"
        )
    found = {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": heads.qkv_bias,
        "query_pre_attn_scalar": round(scalar),
        "sliding_window": config.window if local else POSITIONS,
        "layer_types": _layer_types(layers),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
    if local is not None:
        found["rope_local_base_freq"] = local.theta
    if full is not None:
        found["rope_theta"] = full.theta
        found["rope_scaling"] = rope_scaling_record(full.scaling)
    return _named("gemma3_text", "Gemma3ForCausalLM") | found


def _to_opt(
    config: ModelConfig, heads: HeadsConfig, layers: list[Layer]
) -> dict[str, Any]:
    style = config.architecture
    _expressible(
        config,
        feed_forward="relu",
        feed_forward_bias=heads.qkv_bias,
        norm_outputs=False,
    )
    for name, found, expected in (
        ("learned_positions > 0", style.learned_positions > 0, True),
        ("output_bias", heads.output_bias, heads.qkv_bias),
        ("qk_norm", heads.qk_norm, "none"),
        ("query_scale", heads.query_scale, None),
        ("num_kv_heads", heads.num_kv_heads, heads.num_heads),
        ("num_heads * head_dim", heads.num_heads * heads.head_dim, config.model_dim),
        ("norm_epsilon", config.norm_epsilon, LAYER_NORM_EPSILON),
        ("sliding_window in mechanisms", any(x.window for x in layers), False),
    ):
        if found != expected:
            raise ValueError(f"{name} must be {expected} in OPT, got {found}")
    return _named("opt", "OPTForCausalLM") | {
        "ffn_dim": config.hidden_dim,
        # OPT's table has 2 rows more than positions.
        "max_position_embeddings": style.learned_positions - 2,
        "do_layer_norm_before": style.norm_first,
        "word_embed_proj_dim": style.embedding_dim or config.model_dim,
        "activation_function": "relu",
        "enable_bias": heads.qkv_bias,
        "layer_norm_elementwise_affine": True,
        "_remove_final_layer_norm": False,
        "dropout": 0.0,
    }


def _named(family: Family, architecture: str) -> dict[str, Any]:
    return {"model_type": family, "architectures": [architecture]}


def _heads(config: ModelConfig) -> HeadsConfig:
    """Attention sizes that all layers share, without RoPE."""
    found = {
        m.plain_attention
        and dataclasses.replace(
            m.plain_attention.heads, rope_theta=None, rope_scaling=None
        )
        for m in config.mechanisms
    }
    if None in found:
        raise ValueError(
            "mechanisms must be full attention or sliding windows for a published "
            f"family, got {kinds(config)}"
        )
    (heads, *others) = found
    if others or heads is None:
        raise ValueError(
            "mechanisms must all have the same attention heads, got "
            f"{config.mechanisms}"
        )
    return heads


def _layers(config: ModelConfig) -> list[Layer]:
    """Window and RoPE of each layer.

    Raises:
        ValueError: if there are several windows, or one with sinks.
    """
    if sinks := max(getattr(mechanism, "sinks", 0) for mechanism in config.layers):
        raise ValueError(f"sinks must be 0 in a published family, got {sinks}")
    layers = [
        Layer(m.tokens_per_call or 0, m.attention.rope_theta, m.attention.rope_scaling)
        for m in config.layers
        if m.attention
    ]
    different = {layer.window for layer in layers if layer.window}
    if len(different) > 1:
        raise ValueError(
            f"windows must all be alike in a published family, got {sorted(different)}"
        )
    return layers


def _same_rope(layers: list[Layer]) -> Layer | None:
    """One of the layers, if there is one; ValueError if they differ in their RoPE."""
    if len({layer[1:] for layer in layers}) > 1:
        raise ValueError(
            "rope_theta and rope_scaling must be alike in layers of one kind in a "
            f"published family, got {sorted({str(layer[1:]) for layer in layers})}"
        )
    return layers[0] if layers else None


def _layer_types(layers: list[Layer]) -> list[str]:
    return [SLIDING if layer.window else FULL for layer in layers]


def _qwen_windows(config: ModelConfig, layers: list[Layer]) -> dict[str, Any]:
    sliding = any(layer.window for layer in layers)
    first = next((i for i, layer in enumerate(layers) if layer.window), len(layers))
    return {
        "use_sliding_window": sliding,
        "sliding_window": config.window if sliding else None,
        "max_window_layers": first,
        "layer_types": _layer_types(layers),
    }


def _expressible(config: ModelConfig, **expected: Any) -> None:
    """Raises ValueError unless the architecture's fields have the family's values."""
    for name, value in expected.items():
        _alike(f"architecture.{name}", getattr(config.architecture, name), value)


def _alike(name: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise ValueError(
            f"{name} must be {expected!r} in the published family that is nearest, "
            f"got {found!r}"
        )
