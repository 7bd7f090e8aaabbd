"""Reads Hugging Face's `config.json` of the model families that are supported.

Llama 2 and 3, SmolLM and OpenLlama ("llama"); SmolLM3; Mistral; Qwen2, Qwen2.5 and
Qwen3; OLMo 2; the text models of Gemma 3 ("gemma3_text"); OPT. `export` writes the
file, and `tensor_names` has the names of their tensors.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from memjax.checks import check_positive, require_known, short
from memjax.mechanisms import AttentionConfig, SlidingWindowConfig
from memjax.mechanisms.layers.rope import RopeScaling
from memjax.models.checkpoints.hf.fields import (
    first_slots,
    read_entry,
    read_heads,
    read_layers,
    read_rope,
    read_size,
    require_value,
)
from memjax.models.checkpoints.hf.hybrids import config as hybrid_config
from memjax.models.checkpoints.hf.hybrids.files import TEXT_OF, text_config
from memjax.models.checkpoints.hf.known_keys import require_only
from memjax.models.checkpoints.hf.option_keys import keys_named
from memjax.models.language_model.config import Architecture, Dtype, ModelConfig, period

Family = Literal[
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "smollm3",
    "olmo2",
    "gemma3_text",
    "opt",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_next",
    "nemotron_h",
    "olmo_hybrid",
    "mamba2",
    "granitemoehybrid",
    "bamba",
    "falcon_h1",
    "gated_deltanet",
    "delta_net",
    "gla",
    "gsa",
    "retnet",
    "hgrn2",
    "lfm2",
    "mamba",
    "falcon_mamba",
    "recurrent_gemma",
]
LAYER_NORM_EPSILON = 1e-5
SLIDING, FULL = "sliding_attention", "full_attention"
# Of SmolLM3 and Gemma 3 where their files do not say.
SMOLLM3_THETA, GEMMA_THETA, GEMMA_LOCAL_THETA = 2e6, 1e6, 1e4
GEMMA_PATTERN, SMOLLM3_PATTERN = 6, 4


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
    family = require_family(config, "config.json")
    # The file's shapes may be right, and its numbers codes of a quantization.
    if config.get("quantization_config"):
        raise ValueError(
            "quantization_config must be absent: weights of safetensors are read as "
            f"they are, got {short(config['quantization_config'])}"
        )
    require_only(config)
    if family in TEXT_OF:
        return from_hf_config(text_config(config), dtype)
    with keys_named(config):
        if family in hybrid_config.READ:
            return hybrid_config.READ[family](config, dtype)
        if family == "opt":
            return _from_opt(config, dtype)
        return _from_decoder(config, family, dtype)


def require_family(config: Mapping[str, Any], where: str) -> str:
    """The family of a `config.json`; ValueError with those that are read here."""
    try:
        family = read_entry(config, "model_type", str)
        require_known("model_type", family, get_args(Family))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return family


class Layer(NamedTuple):
    """Differences between the layers of a model.

    Attributes:
        window: tokens that a query sees; 0 is all.
        theta: of RoPE; None is no RoPE.
        scaling: of RoPE.
    """

    window: int
    theta: float | None
    scaling: RopeScaling | None


def _from_decoder(config: Mapping[str, Any], family: str, dtype: Dtype) -> ModelConfig:
    """All families but OPT, whose layers differ from Llama's in a few places."""
    gemma = family == "gemma3_text"
    activation = ("hidden_activation", "gelu_pytorch_tanh")
    _require_activation(config, *(activation if gemma else ("hidden_act", "silu")))
    width, layers = read_size(config, "hidden_size"), read_layers(config)
    capacity = read_size(config, "max_position_embeddings")
    sizes = _read_sizes(config, family)
    tied = read_entry(
        config, "tie_word_embeddings", bool, family in ("smollm3", "gemma3_text")
    )
    if gemma and not tied:
        raise ValueError("tie_word_embeddings must be true in gemma3_text, got False")
    biased = family in ("llama", "smollm3") and read_entry(
        config, "mlp_bias", bool, False
    )
    return ModelConfig(
        mechanisms=period(
            _mechanism(layer, sizes, capacity)
            for layer in _read_layers(config, family, layers, capacity)
        ),
        num_layers=layers,
        vocab_size=read_size(config, "vocab_size"),
        model_dim=width,
        hidden_dim=read_size(config, "intermediate_size"),
        architecture=Architecture(
            norm_first=family != "olmo2",
            norm_outputs=family in ("olmo2", "gemma3_text"),
            feed_forward="geglu" if gemma else "swiglu",
            feed_forward_bias=biased,
            scale_embedding=gemma,
        ),
        norm_epsilon=read_entry(config, "rms_norm_eps", float),
        tied_head=tied,
        dtype=dtype,
    )


def _require_activation(config: Mapping[str, Any], key: str, name: str) -> None:
    require_value(config, key, name, default=name)


def _mechanism(
    layer: Layer, sizes: Mapping[str, Any], capacity: int
) -> AttentionConfig | SlidingWindowConfig:
    rope = {"rope_theta": layer.theta, "rope_scaling": layer.scaling}
    if layer.window:
        return SlidingWindowConfig(**sizes, **rope, window=layer.window)
    scaling = layer.scaling
    if scaling is not None and scaling.kind == "yarn":
        # Files have the length before or after scaling, and transformers reads both.
        capacity = max(capacity, round(scaling.factor * scaling.original_positions))
    slots = first_slots(capacity)
    return AttentionConfig(**sizes, **rope, capacity=capacity, initial_slots=slots)


def _read_sizes(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Attention sizes that all layers share."""
    width, heads = read_size(config, "hidden_size"), read_heads(config)
    # Absent in old Llama configs. The defaults of other families are those of one
    # model, so they must be given.
    derived = family in ("llama", "olmo2") or "num_key_value_heads" in config
    kv_heads = read_size(config, "num_key_value_heads", heads if derived else None)
    if heads % kv_heads:
        raise ValueError(
            f"num_key_value_heads must divide num_attention_heads={heads}, "
            f"got {kv_heads}"
        )
    own_width = family in ("qwen3", "gemma3_text")
    switched = family not in ("mistral", "qwen2")
    bias = switched and read_entry(config, "attention_bias", bool, False)
    sizes = {
        "model_dim": width,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": read_size(
            config, "head_dim", None if own_width else width // heads
        ),
        "qkv_bias": family == "qwen2" or bias,
        "output_bias": bias,
    }
    if family in ("qwen3", "olmo2", "gemma3_text"):
        sizes["qk_norm"] = "width" if family == "olmo2" else "head"
        sizes["qk_norm_epsilon"] = read_entry(config, "rms_norm_eps", float)
    if family == "gemma3_text":
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if config.get(key) is not None:
                raise ValueError(f"{key} must be null, got {short(config[key])}")
        require_value(config, "use_bidirectional_attention", False, default=False)
        scalar = read_entry(config, "query_pre_attn_scalar", float)
        check_positive(query_pre_attn_scalar=scalar)
        if scalar != sizes["head_dim"]:
            sizes["query_scale"] = scalar**-0.5
    return sizes


def _from_opt(config: Mapping[str, Any], dtype: Dtype) -> ModelConfig:
    _require_activation(config, "activation_function", "relu")
    require_value(config, "layer_norm_elementwise_affine", True, default=True)
    require_value(config, "_remove_final_layer_norm", False, default=False)
    width, heads = read_size(config, "hidden_size"), read_heads(config)
    capacity = read_size(config, "max_position_embeddings")
    bias = read_entry(config, "enable_bias", bool, True)
    embedding = read_size(config, "word_embed_proj_dim", width)
    attention = AttentionConfig(
        model_dim=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        rope_theta=None,
        qkv_bias=bias,
        output_bias=bias,
        capacity=capacity,
        initial_slots=first_slots(capacity),
    )
    return ModelConfig(
        mechanisms=(attention,),
        num_layers=read_layers(config),
        vocab_size=read_size(config, "vocab_size"),
        model_dim=width,
        hidden_dim=read_size(config, "ffn_dim"),
        architecture=Architecture(
            norm="layer",
            norm_first=read_entry(config, "do_layer_norm_before", bool, True),
            feed_forward="relu",
            learned_positions=capacity + 2,
            feed_forward_bias=bias,
            embedding_dim=None if embedding == width else embedding,
            scale_embedding=False,
        ),
        norm_epsilon=LAYER_NORM_EPSILON,
        tied_head=read_entry(config, "tie_word_embeddings", bool, True),
        dtype=dtype,
    )


def _read_layers(
    config: Mapping[str, Any], family: str, layers: int, capacity: int
) -> list[Layer]:
    """Window and RoPE of each layer, first to last."""
    if family == "gemma3_text":
        return _gemma_layers(config, layers, capacity)
    if family == "smollm3":
        return _smollm3_layers(config, layers, capacity)
    rope = read_rope(config, capacity)
    return [Layer(window, *rope) for window in _read_windows(config, family, layers)]


def _gemma_layers(config: Mapping[str, Any], layers: int, capacity: int) -> list[Layer]:
    """Windows with a RoPE of their own, and every sixth layer with full attention."""
    pattern = read_size(config, "sliding_window_pattern", GEMMA_PATTERN)
    kinds = [SLIDING if (i + 1) % pattern else FULL for i in range(layers)]
    kinds = _read_kinds(config, kinds, (SLIDING, FULL))
    window = read_size(config, "sliding_window")
    # In transformers 5 a record for each of the two; in 4 the scaling is of the full
    # attention alone.
    both = read_entry(config, "rope_parameters", dict, {})
    if both:
        full, local = ({"rope_parameters": both.get(k)} for k in (FULL, SLIDING))
    else:
        full = {key: config.get(key) for key in ("rope_theta", "rope_scaling")}
        local = {"rope_theta": config.get("rope_local_base_freq")}
    ropes = {FULL: read_rope(full, capacity, GEMMA_THETA)}
    try:
        ropes[SLIDING] = read_rope(local, capacity, GEMMA_LOCAL_THETA)
    except ValueError as error:
        place = "rope_parameters.sliding_attention" if both else "rope_local_base_freq"
        raise ValueError(f"{place}: {error}") from error
    return [Layer(window if k == SLIDING else 0, *ropes[k]) for k in kinds]


def _smollm3_layers(
    config: Mapping[str, Any], layers: int, capacity: int
) -> list[Layer]:
    """Every fourth layer has no RoPE, and the window if there is one."""
    interval = read_size(config, "no_rope_layer_interval", SMOLLM3_PATTERN)
    fallback = [int((i + 1) % interval != 0) for i in range(layers)]
    with_rope = read_entry(config, "no_rope_layers", list, fallback)
    if len(with_rope) != layers or not all(rope in (0, 1) for rope in with_rope):
        raise ValueError(
            f"no_rope_layers must have 0 or 1 for each of {layers} layers, "
            f"got {short(with_rope)}"
        )
    used = read_entry(config, "use_sliding_window", bool, False)
    window = read_size(config, "sliding_window", 0) if used else 0
    kinds = [SLIDING if window and not rope else FULL for rope in with_rope]
    kinds = _read_kinds(config, kinds, (SLIDING, FULL) if window else (FULL,))
    rope, none = read_rope(config, capacity, SMOLLM3_THETA), (None, None)
    return [
        Layer(window if kind == SLIDING else 0, *(rope if turns else none))
        for kind, turns in zip(kinds, with_rope, strict=True)
    ]


def _read_windows(config: Mapping[str, Any], family: str, layers: int) -> list[int]:
    """The window of each layer; 0 is full attention."""
    if family == "mistral" and "sliding_window" not in config:
        raise ValueError("sliding_window is missing from config.json; null is none")
    qwen = family in ("qwen2", "qwen3")
    used = family == "mistral" or (
        qwen and read_entry(config, "use_sliding_window", bool, False)
    )
    window = read_size(config, "sliding_window", 0) if used else 0
    first = read_entry(config, "max_window_layers", int, 28) if qwen else 0
    kinds = [SLIDING if window and layer >= first else FULL for layer in range(layers)]
    allowed = (SLIDING, FULL) if window else (FULL,)
    if not qwen:
        # The family's class does not look at them.
        allowed = tuple(set(kinds))
    return [window if k == SLIDING else 0 for k in _read_kinds(config, kinds, allowed)]


def _read_kinds(
    config: Mapping[str, Any], fallback: list[str], allowed: tuple[str, ...]
) -> list[str]:
    """The kind of attention of each layer, where the file says it."""
    given = read_entry(config, "layer_types", list, fallback)
    if len(given) != len(fallback) or not all(kind in allowed for kind in given):
        raise ValueError(
            f"layer_types must name the {len(fallback)} layers of "
            f"{config.get('model_type')}, each of {sorted(allowed)} with "
            f"sliding_window={config.get('sliding_window')}, got {short(given)}"
        )
    return given
