"""Bytes of a state by kind: some are constant, others grow with the text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memjax.models.checkpoints.hf.safetensors_file import SafetensorsFile
from memjax.models.checkpoints.memory_state import NUMBER_FORMATS, TENSORS

#: Parts of a state, of which a cache alone grows with the text.
KINDS = ("memory", "attention cache", "convolution")


def saved_bytes(folder: Path | str) -> dict[str, int]:
    """`bytes_by_kind` of a saved state, without reading it.

    Raises:
        ValueError: if the file is damaged. OSError: no such folder.
    """
    file = Path(folder) / TENSORS
    return bytes_by_kind(SafetensorsFile(file, NUMBER_FORMATS).nbytes)


def bytes_by_kind(leaves: Mapping[str, int]) -> dict[str, int]:
    """Bytes of a state's memories, caches of attention, and inputs of convolutions.

    Args:
        leaves: bytes of each, by the name that it is saved under.
    """
    found: dict[str, int] = dict.fromkeys(KINDS, 0)
    for name, count in leaves.items():
        found[_kind(name, leaves)] += count
    return found


def _kind(name: str, names: Mapping[str, Any]) -> str:
    """The kind of a leaf of a state, by its name and those beside it."""
    parent, _, leaf = name.rpartition(".")
    if f"{parent}.keys" in names:
        return "attention cache"
    # Last inputs of queries and keys, and of values.
    inputs = f"{parent}.window" in names and leaf in ("window", "values")
    return "convolution" if inputs else "memory"
