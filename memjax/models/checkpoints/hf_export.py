"""Writes Hugging Face's `config.json` of a model that one of its families describes."""

from typing import Any

from memjax.mechanisms import AttentionConfig, SlidingWindowConfig
from memjax.mechanisms.layers.rope import RopeScaling
from memjax.models.checkpoints.hf_config import LAYER_NORM_EPSILON, Family
from memjax.models.language_model.config import ModelConfig, kinds

# max_position_embeddings of a model of windows alone, which has no limit: Mistral's.
POSITIONS = 32_768


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` from which transformers builds the same function.

    A tied head with a scaled embedding becomes an untied one: transformers does not
    scale embeddings, so `tensors_from_parameters` gives the head a matrix of its own.

    Raises:
        ValueError: if no family has the model's mixers, norms, biases or positions.
    """
    published = AttentionConfig | SlidingWindowConfig
    if not all(isinstance(mixer, published) for mixer in config.mixers):
        raise ValueError(
            "mixers must be full attention or sliding windows for a published family, "
            f"got {kinds(config)}"
        )
    common = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.heads.num_heads,
        "tie_word_embeddings": tied_in_file(config),
    }
    if config.architecture.norm == "layer":
        return _to_opt(config) | common
    return _to_llama(config) | common


def tied_in_file(config: ModelConfig) -> bool:
    """Whether Hugging Face's model has one tensor as both embedding and head."""
    # A scaled embedding is another matrix than the head.
    return config.tied_head and not config.architecture.scale_embedding


def _to_llama(config: ModelConfig) -> dict[str, Any]:
    heads, windows = config.heads, _windows(config)
    sliding = any(windows)
    _expressible(
        config,
        norm_first=True,
        feed_forward="swiglu",
        learned_positions=0,
        embedding_dim=None,
    )
    if heads.rope_theta is None:
        raise ValueError("rope_theta must be a number in Llama's families, got None")
    if config.model_dim % config.heads.num_heads:
        raise ValueError(
            f"num_heads must divide model_dim={config.model_dim} in transformers, "
            f"got {config.heads.num_heads}"
        )
    common = {
        "intermediate_size": config.hidden_dim,
        "num_key_value_heads": config.heads.num_kv_heads,
        "head_dim": config.heads.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.capacity or POSITIONS,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.heads.rope_theta,
        "rope_scaling": _rope_record(heads.rope_scaling),
    }
    hidden_bias = config.architecture.feed_forward_bias
    # Llama has one switch for all four biases of attention, and no window.
    if heads.qkv_bias == heads.output_bias and not sliding:
        biases = {"attention_bias": heads.qkv_bias, "mlp_bias": hidden_bias}
        return _named("llama", "LlamaForCausalLM") | common | biases
    if heads.output_bias:
        raise ValueError("output_bias must be False in the family, got True")
    _expressible(config, feed_forward_bias=False)
    if heads.qkv_bias:
        layers = {
            "use_sliding_window": sliding,
            "sliding_window": config.window if sliding else None,
            "max_window_layers": next(
                (i for i, window in enumerate(windows) if window), len(windows)
            ),
            "layer_types": [
                "sliding_attention" if window else "full_attention"
                for window in windows
            ],
        }
        return _named("qwen2", "Qwen2ForCausalLM") | common | layers
    if not all(windows):
        raise ValueError(
            "mixers must all be alike without qkv_bias: only Qwen2 mixes attention "
            f"and sliding windows, got {kinds(config)}"
        )
    window = {"sliding_window": config.window}
    return _named("mistral", "MistralForCausalLM") | common | window


def _to_opt(config: ModelConfig) -> dict[str, Any]:
    style, heads = config.architecture, config.heads
    _expressible(config, feed_forward="relu", feed_forward_bias=heads.qkv_bias)
    for name, found, expected in (
        ("learned_positions > 0", style.learned_positions > 0, True),
        ("output_bias", heads.output_bias, heads.qkv_bias),
        ("num_kv_heads", heads.num_kv_heads, heads.num_heads),
        ("num_heads * head_dim", heads.num_heads * heads.head_dim, config.model_dim),
        ("norm_epsilon", config.norm_epsilon, LAYER_NORM_EPSILON),
        ("sliding_window in mixers", any(_windows(config)), False),
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


def _windows(config: ModelConfig) -> list[int]:
    """The window of each layer; 0 is full attention.

    Raises:
        ValueError: if there are several.
    """
    windows = [
        mixer.window if isinstance(mixer, SlidingWindowConfig) else 0
        for mixer in config.layers
    ]
    if len(different := {window for window in windows if window}) > 1:
        raise ValueError(
            f"windows must all be alike in a published family, got {sorted(different)}"
        )
    return windows


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
    """Raises ValueError unless the architecture's fields have the family's values."""
    for name, value in expected.items():
        found = getattr(config.architecture, name)
        if found != value:
            raise ValueError(
                f"architecture.{name} must be {value!r} in the published family that "
                f"is nearest, got {found!r}"
            )
