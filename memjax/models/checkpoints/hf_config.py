"""Reads Hugging Face's `config.json` of the model families that are supported.

Llama 2 and 3, SmolLM and OpenLlama ("llama"); Mistral; Qwen2 and Qwen2.5; OPT.
`hf_export` writes the file, and `tensor_names` has the names of their tensors.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from memjax.checks import require_known
from memjax.mechanisms import AttentionConfig, SlidingWindowConfig
from memjax.mechanisms.layers.rope import RopeScaling
from memjax.models.language_model.config import (
    Architecture,
    Dtype,
    ModelConfig,
    period,
)

Family = Literal["llama", "mistral", "qwen2", "opt"]
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
LAYER_NORM_EPSILON = 1e-5
MAX_LAYERS = 1024


def from_hf_config(config: Mapping[str, Any], dtype: Dtype = "float32") -> ModelConfig:
    """The model that a `config.json` describes.

    Args:
        config: content of the file, of transformers 4 or 5; not trusted.
        dtype: of the activations; the one in the file is that of its tensors.

    Raises:
        ValueError: naming the key, if one is missing or not of its type, or if the
            model has something unsupported: another `model_type`, activation or kind
            of RoPE, quantized weights.
    """
    family = _read(config, "model_type", str)
    require_known("model_type", family, get_args(Family))
    # The file's shapes may be right, and its numbers codes of a quantization.
    if config.get("quantization_config"):
        raise ValueError(
            "quantization_config must be absent: weights of safetensors are read as "
            f"they are, got {config['quantization_config']!r}"
        )
    if family == "opt":
        return _from_opt(config, dtype)
    return _from_llama(config, family, dtype)


def _from_llama(config: Mapping[str, Any], family: str, dtype: Dtype) -> ModelConfig:
    _require(config, "hidden_act", "silu", default="silu")
    width, heads = _size(config, "hidden_size"), _heads(config)
    layers = _layers(config)
    capacity = _size(config, "max_position_embeddings")
    theta, scaling = _read_rope(config, capacity)
    windows = _read_windows(config, family, layers)
    # Absent in old Llama configs. The defaults of the other families are those of one
    # model, so they must be given.
    fallback = heads if family == "llama" or "num_key_value_heads" in config else None
    kv_heads = _size(config, "num_key_value_heads", fallback)
    if heads % kv_heads:
        raise ValueError(
            f"num_key_value_heads must divide num_attention_heads={heads}, "
            f"got {kv_heads}"
        )
    attention_bias = family == "llama" and _read(config, "attention_bias", bool, False)
    sizes: Any = dict(
        model_dim=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_size(config, "head_dim", width // heads),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=attention_bias,
    )
    return ModelConfig(
        mixers=period(
            SlidingWindowConfig(**sizes, window=window)
            if window
            else AttentionConfig(**sizes, capacity=capacity)
            for window in windows
        ),
        num_layers=layers,
        vocab_size=_size(config, "vocab_size"),
        model_dim=width,
        hidden_dim=_size(config, "intermediate_size"),
        architecture=Architecture(
            feed_forward_bias=family == "llama"
            and _read(config, "mlp_bias", bool, False),
            scale_embedding=False,
        ),
        norm_epsilon=_read(config, "rms_norm_eps", float),
        tied_head=_read(config, "tie_word_embeddings", bool, False),
        dtype=dtype,
    )


def _from_opt(config: Mapping[str, Any], dtype: Dtype) -> ModelConfig:
    _require(config, "activation_function", "relu", default="relu")
    _require(config, "layer_norm_elementwise_affine", True, default=True)
    _require(config, "_remove_final_layer_norm", False, default=False)
    width, heads = _size(config, "hidden_size"), _heads(config)
    capacity = _size(config, "max_position_embeddings")
    bias = _read(config, "enable_bias", bool, True)
    embedding = _size(config, "word_embed_proj_dim", width)
    attention = AttentionConfig(
        model_dim=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        rope_theta=None,
        qkv_bias=bias,
        output_bias=bias,
        capacity=capacity,
    )
    return ModelConfig(
        mixers=(attention,),
        num_layers=_layers(config),
        vocab_size=_size(config, "vocab_size"),
        model_dim=width,
        hidden_dim=_size(config, "ffn_dim"),
        architecture=Architecture(
            norm="layer",
            norm_first=_read(config, "do_layer_norm_before", bool, True),
            feed_forward="relu",
            learned_positions=capacity + 2,
            feed_forward_bias=bias,
            embedding_dim=None if embedding == width else embedding,
            scale_embedding=False,
        ),
        norm_epsilon=LAYER_NORM_EPSILON,
        tied_head=_read(config, "tie_word_embeddings", bool, True),
        dtype=dtype,
    )


def _read_windows(config: Mapping[str, Any], family: str, layers: int) -> list[int]:
    """The window of each layer; 0 is full attention."""
    if family == "mistral" and "sliding_window" not in config:
        raise ValueError("sliding_window is missing from config.json; null is none")
    used = family == "mistral" or (
        family == "qwen2" and _read(config, "use_sliding_window", bool, False)
    )
    window = _size(config, "sliding_window", 0) if used else 0
    first = _read(config, "max_window_layers", int, 28) if family == "qwen2" else 0
    kinds = [
        "sliding_attention" if window and layer >= first else "full_attention"
        for layer in range(layers)
    ]
    given = _read(config, "layer_types", list, kinds)
    allowed = {"full_attention"} | ({"sliding_attention"} if window else set())
    free = family == "qwen2" and len(given) == layers and allowed.issuperset(given)
    if given != kinds and not free:
        raise ValueError(
            f"layer_types must name the {layers} layers of {family}, each of "
            f"{sorted(allowed)} with sliding_window={window or None}, got {given!r}"
        )
    return [window if kind == "sliding_attention" else 0 for kind in given]


def _read_rope(
    config: Mapping[str, Any], capacity: int
) -> tuple[float, RopeScaling | None]:
    """θ and scaling, in one record in transformers 5 and in two places in 4."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = {
        "rope_theta": config.get("rope_theta"),
        "partial_rotary_factor": config.get("partial_rotary_factor"),
    } | _read(config, key, dict, {})
    theta = _read(rope, "rope_theta", float, 10_000.0)
    _require(rope, "partial_rotary_factor", 1.0, default=1.0)
    kind = _read(rope, "rope_type", str, _read(rope, "type", str, "default"))
    if kind not in ROPE_TYPES:
        raise ValueError(
            f"rope_type must be one of {ROPE_TYPES}, got {kind!r} in {key}"
        )
    if kind == "default":
        return theta, None
    factor = _read(rope, "factor", float)
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    original = _size(rope, "original_max_position_embeddings", capacity)
    original = _size(config, "original_max_position_embeddings", original)
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            factor,
            low_frequency_factor=_read(rope, "low_freq_factor", float),
            high_frequency_factor=_read(rope, "high_freq_factor", float),
            original_positions=original,
        )
    _require(rope, "truncate", True, default=True)
    return theta, RopeScaling(
        "yarn",
        factor,
        original_positions=original,
        beta_fast=_read(rope, "beta_fast", float, 32.0),
        beta_slow=_read(rope, "beta_slow", float, 1.0),
        attention_factor=_read_attention_factor(rope, factor),
    )


def _read_attention_factor(rope: Mapping[str, Any], factor: float) -> float | None:
    """YaRN's attention factor, given directly or as DeepSeek's quotient of two."""
    given = _read(rope, "attention_factor", float, 0.0)
    above = _read(rope, "mscale", float, 0.0)
    below = _read(rope, "mscale_all_dim", float, 0.0)
    if given:
        return given
    if not (above and below):
        return None
    part = lambda scale: 0.1 * scale * math.log(factor) + 1.0
    return part(above) / part(below)


def _heads(config: Mapping[str, Any]) -> int:
    heads, width = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    if width % heads and not config.get("head_dim"):
        raise ValueError(
            f"num_attention_heads must divide hidden_size={width}, got {heads}"
        )
    return heads


def _layers(config: Mapping[str, Any]) -> int:
    layers = _size(config, "num_hidden_layers")
    # A malformed file must not make the caller build millions of layers.
    if layers > MAX_LAYERS:
        raise ValueError(
            f"num_hidden_layers must be at most {MAX_LAYERS}, got {layers}"
        )
    return layers


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """An integer that is at least 1; the default is not checked."""
    size = _read(config, key, int, default)
    if config.get(key) is not None and size < 1:
        raise ValueError(f"{key} must be at least 1, got {size}")
    return size


def _read(config: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """A value, checked for its type; the default, if not None, where it is null."""
    value = config.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"{key} is missing from config.json")
        return default
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{key} must be of type {kind.__name__}, got {value!r}")
    return value


def _require(config: Mapping[str, Any], key: str, allowed: Any, default: Any) -> None:
    """Raises ValueError unless a value is the only supported one."""
    value = _read(config, key, type(allowed), default)
    if value != allowed:
        raise ValueError(f"{key} must be {allowed!r}, got {value!r}")
