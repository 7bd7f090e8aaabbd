"""Reads metadata entries of a GGUF file's architecture, each checked."""

from typing import Any

import numpy as np

from memjax.checks import LARGEST_SIZE, short
from memjax.models.checkpoints.gguf.parts import GGUFParts
from memjax.models.checkpoints.hf.fields import MAX_LAYERS

# Range of a positive number.
REALS = (1e-38, 1e38)


class Entries:
    """Metadata entries of the architecture, each checked for its type and range."""

    def __init__(self, file: GGUFParts):
        self.file = file
        self.prefix = file.metadata["general.architecture"]

    def __call__(self, key: str, default: int | None = None) -> int:
        """A whole number above 0 and below 2**31; of layers at most `MAX_LAYERS`."""
        found = self.find(key, default)
        if type(found) is not int:
            raise self.error(key, "must be a whole number", found)
        if found < 1:
            raise self.error(key, "must be at least 1", found)
        # A malformed file must not make the caller build millions of layers.
        most = MAX_LAYERS if key == "block_count" else LARGEST_SIZE
        if found > most:
            raise self.error(key, f"must be at most {most:,}", found)
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

    def multiplier(self, key: str, default: float = 1.0) -> float:
        """A positive number; the default where there is none, or 0."""
        return self.real(key, default) if self.find(key, 0.0) != 0 else default

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        found = self.find(key, default)
        if type(found) is not bool:
            raise self.error(key, "must be true or false", found)
        return found

    def by_layer(self, key: str, kind: type, layers: int) -> list[Any]:
        """An array with a value for each layer, bool or int."""
        found = self.find(key)
        numbers, name = ("b", "booleans") if kind is bool else ("iu", "whole numbers")
        array = isinstance(found, np.ndarray) and found.dtype.kind in numbers
        if not array or found.shape != (layers,):
            raise self.error(key, f"must be {layers} {name}, one a layer", found)
        return found.tolist()

    def require(self, key: str, expected: int | float) -> None:
        """Raises ValueError for an entry with another value."""
        found = self.find(key, expected)
        if type(found) not in (int, float) or found != expected:
            raise self.error(key, f"must be {expected!r}", found)

    def __contains__(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.file.metadata

    def find(self, key: str, default: Any = None) -> Any:
        """An entry of any type; ValueError if it is missing without a default."""
        found = self.file.metadata.get(f"{self.prefix}.{key}", default)
        if found is None:
            raise ValueError(f"{self.file.path} lacks the entry {self.prefix}.{key}")
        return found

    def error(self, key: str, allowed: str, found: Any) -> ValueError:
        """The error for an entry that is not as `allowed` says."""
        return ValueError(
            f"{self.file.path}: {self.prefix}.{key} {allowed}, got {short(found)}"
        )
