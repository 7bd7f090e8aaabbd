"""Reads the `config.json` of the original model from the metadata of a GGUF file."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from memjax.checks import short
from memjax.models.checkpoints.gguf.parts import GGUFParts
from memjax.models.checkpoints.hf.config import FULL, SLIDING

# Norms of a layer in GGUF -> in Hugging Face, where they come before attention and
# feed-forward (Llama), after them (OLMo 2), or both (Gemma 3).
BEFORE = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
AROUND = AFTER | {
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
}
ROPE_FACTORS = "rope_freqs.weight"
ROPE_TYPES = ("none", "linear", "yarn")
# The published RoPE scaling of Llama 3.1 and 3.2. GGUF has only the factors by channel.
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# What llama.cpp takes where there is no entry. SmolLM3 has no entry for its layers
# without RoPE, and Gemma 3 none for the scale of its scores: the 27B alone, known by
# its layers, divides them by the square root of width / heads, not of a head's width.
THETA, GEMMA_PATTERN, SMOLLM3_INTERVAL, GEMMA_27B_LAYERS = 10_000.0, 6, 4, 62
# Range of a positive number.
REALS = (1e-38, 1e38)


class Architecture(NamedTuple):
    """Differences between the architectures.

    Attributes:
        model_type: of Hugging Face.
        name: of Hugging Face's class.
        norms: of a layer, their names in the file -> Hugging Face's.
        permuted: whether the channels that RoPE rotates together are stored next to
            each other.
        shifted: whether norms are stored with 1 added.
        theta: of RoPE where the file does not say; None must be said, because
            llama.cpp and Hugging Face would take different ones.
    """

    model_type: str
    name: str
    norms: dict[str, str] = BEFORE
    permuted: bool = False
    shifted: bool = False
    theta: float | None = THETA


# By general.architecture.
ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", permuted=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", permuted=True, theta=None),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", AFTER),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", AROUND, shifted=True, theta=None
    ),
}


def read_architecture(file: GGUFParts) -> Architecture:
    """The architecture of a file; ValueError with those that are read here."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(
            f"{file.path}: general.architecture={short(name)} is not read, "
            f"expected one of {tuple(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def read_config(
    file: GGUFParts, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """The `config.json` of the original model.

    Args:
        file: of a known architecture.
        shapes: of its tensors, by Hugging Face's names; with the embedding.

    Raises:
        ValueError: naming the entry of the metadata that is missing, of another type,
            out of its range, or of a model that is not built here.
    """
    architecture, entry = read_architecture(file), _Entries(file)
    model_type = architecture.model_type
    gemma = model_type == "gemma3_text"
    vocab_size = shapes["model.embed_tokens.weight"][0]
    width, heads = entry("embedding_length"), entry("attention.head_count")
    head_dim = entry("attention.key_length", None if gemma else width // heads)
    entry.require("attention.value_length", head_dim)
    entry.require("rope.dimension_count", head_dim)
    entry.require("vocab_size", vocab_size)
    entry.require("expert_count", 0)
    config = {
        "model_type": model_type,
        "architectures": [architecture.name],
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": entry("feed_forward_length"),
        "num_hidden_layers": entry("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": entry("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": entry("context_length"),
        "rms_norm_eps": entry.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": entry.real("rope.freq_base", architecture.theta),
    }
    scaling = _rope_scaling(entry, config)
    if scaling:
        config["rope_scaling"] = scaling
    if gemma:
        return config | _gemma(entry, config)
    # OLMo 3 has the architecture of OLMo 2, and windows.
    entry.require("attention.sliding_window", 0)
    config["hidden_act"] = "silu"
    config["tie_word_embeddings"] = "lm_head.weight" not in shapes
    if model_type in ("llama", "smollm3"):
        config["attention_bias"] = any(n.endswith("proj.bias") for n in shapes)
    if model_type == "smollm3":
        config["no_rope_layer_interval"] = SMOLLM3_INTERVAL
    return config


class _Entries:
    """Metadata entries of the architecture, each checked for its type and range."""

    def __init__(self, file: GGUFParts):
        self.file = file
        self.prefix = file.metadata["general.architecture"]

    def __call__(self, key: str, default: int | None = None) -> int:
        """A whole number above 0."""
        found = self.find(key, default)
        if type(found) is not int:
            raise self.error(key, "must be a whole number", found)
        if found < 1:
            raise self.error(key, "must be at least 1", found)
        return found

    def real(self, key: str, default: float | None = None) -> float:
        """A positive number of float32."""
        found = self.find(key, default)
        if type(found) not in (int, float):
            raise self.error(key, "must be a number", found)
        if not REALS[0] <= found <= REALS[1]:
            raise self.error(key, f"must be in {list(REALS)}", found)
        # Stored in float32: 1e-5 is read as 9.999999747378752e-06.
        return float(str(np.float32(found)))

    def require(self, key: str, expected: int | float) -> None:
        """Raises ValueError for an entry with another value."""
        found = self.find(key, expected)
        if type(found) not in (int, float) or found != expected:
            raise self.error(key, f"must be {expected!r}", found)

    def find(self, key: str, default: Any) -> Any:
        found = self.file.metadata.get(f"{self.prefix}.{key}", default)
        if found is None:
            raise ValueError(f"{self.file.path} lacks the entry {self.prefix}.{key}")
        return found

    def error(self, key: str, allowed: str, found: Any) -> ValueError:
        return ValueError(
            f"{self.file.path}: {self.prefix}.{key} {allowed}, got {short(found)}"
        )


def _gemma(entry: _Entries, config: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of Gemma 3 alone. Its RoPE scaling is that of full attention."""
    scalar, layers = config["head_dim"], config["num_hidden_layers"]
    if layers == GEMMA_27B_LAYERS:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": entry("attention.sliding_window"),
        "rope_local_base_freq": entry.real("rope.freq_base_swa", THETA),
        # A head in the file must be a copy of the embedding.
        "tie_word_embeddings": True,
        **_sliding_layers(entry, layers),
    }


def _sliding_layers(entry: _Entries, layers: int) -> dict[str, Any]:
    """Which layers have a window: all but every n-th, or those that are listed."""
    key = "attention.sliding_window_pattern"
    given = entry.find(key, GEMMA_PATTERN)
    if not isinstance(given, np.ndarray):
        return {"sliding_window_pattern": entry(key, GEMMA_PATTERN)}
    if given.dtype != bool or given.shape != (layers,):
        raise entry.error(
            key, f"must be a number or {layers} booleans, one a layer", given
        )
    return {"layer_types": [SLIDING if slides else FULL for slides in given]}


def _rope_scaling(entry: _Entries, config: Mapping[str, Any]) -> dict[str, Any] | None:
    # A file that gives a factor and no type means linear.
    kind = entry.find("rope.scaling.type", "linear")
    if kind not in ROPE_TYPES:
        raise ValueError(
            f"{entry.file.path}: {entry.prefix}.rope.scaling.type={short(kind)} is not "
            f"read, expected one of {ROPE_TYPES}"
        )
    # The second key is the first one's old name.
    factor = entry.real("rope.scaling.factor", entry.real("rope.scale_linear", 1.0))
    factor = 1.0 if kind == "none" else factor
    by_channel = ROPE_FACTORS in entry.file.records
    if by_channel and factor != 1:
        raise ValueError(
            f"{entry.file.path} scales RoPE twice, by {factor} and by {ROPE_FACTORS!r}"
        )
    if kind == "yarn":
        return _yarn_scaling(entry, factor, config["max_position_embeddings"])
    entry.require("rope.scaling.attn_factor", 1.0)
    if by_channel:
        return _llama3_scaling(entry.file, config)
    return None if factor == 1 else {"rope_type": "linear", "factor": factor}


def _yarn_scaling(entry: _Entries, factor: float, capacity: int) -> dict[str, Any]:
    # Other values are of other architectures.
    entry.require("rope.scaling.yarn_ext_factor", 1.0)
    entry.require("rope.scaling.yarn_attn_factor", 1.0)
    entry.require("rope.scaling.yarn_log_multiplier", 0.0)
    amplitude = entry.real("rope.scaling.attn_factor", 1.0)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": entry(
            "rope.scaling.original_context_length", capacity
        ),
        "beta_fast": entry.real("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": entry.real("rope.scaling.yarn_beta_slow", 1.0),
        # Relative to the paper's here, absolute in Hugging Face's files.
        "attention_factor": amplitude * (0.1 * math.log(factor) + 1),
    }


def _llama3_scaling(file: GGUFParts, config: Mapping[str, Any]) -> dict[str, Any]:
    """Recovers Llama 3's published scaling from the factors by channel."""
    stored = file.read(ROPE_FACTORS)
    half = config["head_dim"] // 2
    scaling = LLAMA3_SCALING | {"factor": float(stored.max())}
    if stored.shape == (half,):
        inverse = config["rope_theta"] ** (-np.arange(half) / half)
        wavelength = 2 * np.pi / inverse
        # Rotations within the original context: fast channels have 4 or more.
        rotations = LLAMA3_SCALING["original_max_position_embeddings"] / wavelength
        fast = np.clip((rotations - 1) / (4 - 1), 0, 1)
        expected = 1 / (fast + (1 - fast) / scaling["factor"])
        if np.allclose(stored, expected, rtol=1e-5):
            return scaling
    raise ValueError(
        f"{file.path}: the factors of {ROPE_FACTORS!r} {list(stored.shape)} are not "
        "those of Llama 3.1, which are the only ones read"
    )
