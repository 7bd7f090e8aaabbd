"""Reads the `config.json` of the original model from the metadata of a GGUF file."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from memjax.models.checkpoints.gguf.architecture import THETA, Architecture
from memjax.models.checkpoints.gguf.entries import Entries
from memjax.models.checkpoints.gguf.hybrids.config import READ
from memjax.models.checkpoints.gguf.known_architectures import read_architecture
from memjax.models.checkpoints.gguf.parts import GGUFParts
from memjax.models.checkpoints.gguf.rope import rope_scaling
from memjax.models.checkpoints.hf.config import FULL, SLIDING

# What llama.cpp takes where there is no entry. SmolLM3 has no entry for its layers
# without RoPE, and Gemma 3 none for the scale of its scores: the 27B alone, known by
# its layers, divides them by the square root of width / heads, not of a head's width.
GEMMA_PATTERN, SMOLLM3_INTERVAL, GEMMA_27B_LAYERS = 6, 4, 62


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
    architecture, entry = read_architecture(file), Entries(file)
    model_type = architecture.model_type
    vocab_size = shapes[f"{architecture.outside['token_embd']}.weight"][0]
    entry.require("vocab_size", vocab_size)
    if not architecture.experts:
        entry.require("expert_count", 0)
    config = {
        "model_type": model_type,
        "architectures": [architecture.name],
        "vocab_size": vocab_size,
        "tie_word_embeddings": "lm_head.weight" not in shapes,
    }
    if model_type in READ:
        return config | READ[model_type](entry, shapes)
    return config | _decoder(entry, architecture, shapes)


def _decoder(
    entry: Entries, architecture: Architecture, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Sizes of a model of attention layers alone."""
    model_type = architecture.model_type
    gemma = model_type == "gemma3_text"
    width, heads = entry("embedding_length"), entry("attention.head_count")
    head_dim = entry("attention.key_length", None if gemma else width // heads)
    entry.require("attention.value_length", head_dim)
    entry.require("rope.dimension_count", head_dim)
    config: dict[str, Any] = {
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
    scaling = rope_scaling(entry, config)
    if scaling:
        config["rope_scaling"] = scaling
    if gemma:
        return config | _gemma(entry, config)
    # OLMo 3 has the architecture of OLMo 2, and windows.
    entry.require("attention.sliding_window", 0)
    config["hidden_act"] = "silu"
    if model_type in ("llama", "smollm3"):
        config["attention_bias"] = any(n.endswith("proj.bias") for n in shapes)
    if model_type == "smollm3":
        config["no_rope_layer_interval"] = SMOLLM3_INTERVAL
    return config


def _gemma(entry: Entries, config: Mapping[str, Any]) -> dict[str, Any]:
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


def _sliding_layers(entry: Entries, layers: int) -> dict[str, Any]:
    """Which layers have a window: all but every n-th, or those that are listed."""
    key = "attention.sliding_window_pattern"
    given = entry.find(key, GEMMA_PATTERN)
    if not isinstance(given, np.ndarray):
        return {"sliding_window_pattern": entry(key, GEMMA_PATTERN)}
    slides = entry.by_layer(key, bool, layers)
    return {"layer_types": [SLIDING if sliding else FULL for sliding in slides]}
