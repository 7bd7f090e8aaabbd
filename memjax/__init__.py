"""Long-context memory as pure functions over explicit state."""

import importlib
from typing import Any

#: Also of the package: pyproject.toml reads it here.
__version__ = "0.1.0"

_ROOMS = ("mechanisms", "models", "nnx")


def __getattr__(name: str) -> Any:
    """Imports a room when it is first used: `memjax --help` needs none, and no JAX."""
    if name in _ROOMS:
        return importlib.import_module(f"memjax.{name}")
    raise AttributeError(f"module 'memjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_ROOMS]
