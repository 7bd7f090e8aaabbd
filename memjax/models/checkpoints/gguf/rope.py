"""Reads RoPE scaling from the metadata of a GGUF file."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from memjax.checks import short
from memjax.models.checkpoints.gguf.entries import Entries
from memjax.models.checkpoints.gguf.parts import GGUFParts

ROPE_FACTORS = "rope_freqs.weight"
ROPE_TYPES = ("none", "linear", "yarn")
# The published RoPE scaling of Llama 3.1 and 3.2. GGUF has only the factors by channel.
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def rope_scaling(entry: Entries, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record of Hugging Face's `rope_scaling`; None without scaling.

    Args:
        entry: of the file.
        config: with `head_dim`, `rope_theta` and `max_position_embeddings`.

    Raises:
        ValueError: naming the entry or tensor, for a scaling that is not read.
    """
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


def _yarn_scaling(entry: Entries, factor: float, capacity: int) -> dict[str, Any]:
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
