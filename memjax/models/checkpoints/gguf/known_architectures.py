"""The architectures of GGUF files that are read."""

from memjax.checks import short
from memjax.models.checkpoints.gguf.architecture import (
    AFTER,
    AROUND,
    ATTENTION,
    MLP,
    Architecture,
)
from memjax.models.checkpoints.gguf.entries import Entries
from memjax.models.checkpoints.gguf.hybrids.names import HYBRIDS, variant
from memjax.models.checkpoints.gguf.parts import GGUFParts

# By general.architecture.
ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", permuted=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", permuted=True, theta=None),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", ATTENTION | MLP | AFTER),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        ATTENTION | MLP | AROUND,
        shifted=True,
        theta=None,
    ),
} | HYBRIDS


def read_architecture(file: GGUFParts) -> Architecture:
    """The architecture of a file; ValueError with those that are read here."""
    # An adapter, a matrix of importance and an encoder of images name one too.
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise ValueError(
            f"{file.path}: general.type must be 'model', got {short(kind)}"
        )
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(
            f"{file.path}: general.architecture={short(name)} is not read, "
            f"expected one of {tuple(ARCHITECTURES)}"
        )
    return variant(ARCHITECTURES[name], Entries(file))
