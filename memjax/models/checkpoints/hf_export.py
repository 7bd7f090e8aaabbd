"""Hugging Face's `config.json` for a model of ours, where a family has all it has."""

from typing import Any

from memjax.mechanisms.layers.rope import RopeScaling
from memjax.models.checkpoints.hf_config import LAYER_NORM_EPSILON, Family
from memjax.models.language_model.config import Mixer, ModelConfig


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """What `config.json` must hold for transformers to build the same function.

    A tied head over a scaled embedding is told as a head of its own, which
    `tensors_from_parameters` then gives.

    Raises:
        ValueError: if no family has the model's mixers, norms, biases or positions.
    """
    if others := set(config.mixers) - {"attention", "sliding_window"}:
        raise ValueError(
            f"mixers must be attention or sliding_window for a published family, "
            f"got {sorted(others)}"
        )
    common = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": len(config.mixers),
        "num_attention_heads": config.num_heads,
        "tie_word_embeddings": tied_in_file(config),
    }
    if config.architecture.norm == "layer":
        return _to_opt(config) | common
    return _to_llama(config) | common


def tied_in_file(config: ModelConfig) -> bool:
    """Whether one tensor is both embedding and head in Hugging Face's sense."""
    return config.tied_head and not config.architecture.scale_embedding


def _to_llama(config: ModelConfig) -> dict[str, Any]:
    style, sliding = config.architecture, "sliding_window" in config.mixers
    _expressible(
        config,
        norm_first=True,
        feed_forward="swiglu",
        positions="rope",
        embedding_dim=None,
    )
    if config.model_dim % config.num_heads:
        raise ValueError(
            f"num_heads must divide model_dim={config.model_dim} in transformers, "
            f"got {config.num_heads}"
        )
    common = {
        "intermediate_size": config.hidden_dim,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.capacity,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_record(style.rope_scaling),
    }
    if style.qkv_bias == style.output_bias and not sliding:
        biases = {"attention_bias": style.qkv_bias, "mlp_bias": style.feed_forward_bias}
        return _named("llama", "LlamaForCausalLM") | common | biases
    _expressible(config, output_bias=False, feed_forward_bias=False)
    if style.qkv_bias:
        kinds = {"attention": "full_attention", "sliding_window": "sliding_attention"}
        windows = {
            "use_sliding_window": sliding,
            "sliding_window": config.window if sliding else None,
            "max_window_layers": _first_window(config.mixers),
            "layer_types": [kinds[mixer] for mixer in config.mixers],
        }
        return _named("qwen2", "Qwen2ForCausalLM") | common | windows
    if "attention" in config.mixers:
        raise ValueError(
            "mixers must all be alike without qkv_bias: only Qwen2 mixes attention "
            f"and sliding windows, got {config.mixers}"
        )
    window = {"sliding_window": config.window}
    return _named("mistral", "MistralForCausalLM") | common | window


def _to_opt(config: ModelConfig) -> dict[str, Any]:
    style = config.architecture
    _expressible(
        config,
        feed_forward="relu",
        positions="learned",
        output_bias=style.qkv_bias,
        feed_forward_bias=style.qkv_bias,
    )
    for name, found, expected in (
        ("num_kv_heads", config.num_kv_heads, config.num_heads),
        ("num_heads * head_dim", config.num_heads * config.head_dim, config.model_dim),
        ("norm_epsilon", config.norm_epsilon, LAYER_NORM_EPSILON),
        ("sliding_window in mixers", "sliding_window" in config.mixers, False),
    ):
        if found != expected:
            raise ValueError(f"{name} must be {expected} in OPT, got {found}")
    return _named("opt", "OPTForCausalLM") | {
        "ffn_dim": config.hidden_dim,
        "max_position_embeddings": style.learned_positions - 2,
        "do_layer_norm_before": style.norm_first,
        "word_embed_proj_dim": style.embedding_dim or config.model_dim,
        "activation_function": "relu",
        "enable_bias": style.qkv_bias,
        "layer_norm_elementwise_affine": True,
        "_remove_final_layer_norm": False,
        "dropout": 0.0,
    }


def _named(family: Family, architecture: str) -> dict[str, Any]:
    return {"model_type": family, "architectures": [architecture]}


def _first_window(mixers: tuple[Mixer, ...]) -> int:
    """Layers before the first sliding window."""
    return mixers.index("sliding_window") if "sliding_window" in mixers else len(mixers)


def _rope_record(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    record: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        record["original_max_position_embeddings"] = scaling.original_positions
    if scaling.kind == "llama3":
        record["low_freq_factor"] = scaling.low_frequency_factor
        record["high_freq_factor"] = scaling.high_frequency_factor
    elif scaling.kind == "yarn":
        record["beta_fast"] = scaling.beta_fast
        record["beta_slow"] = scaling.beta_slow
        if scaling.attention_factor is not None:
            record["attention_factor"] = scaling.attention_factor
    return record


def _expressible(config: ModelConfig, **expected: Any) -> None:
    """Raises ValueError unless the architecture is what the family has."""
    for name, value in expected.items():
        found = getattr(config.architecture, name)
        if found != value:
            raise ValueError(
                f"architecture.{name} must be {value!r} in the published family that "
                f"is nearest, got {found!r}"
            )
