"""Long-context memory as pure functions over explicit state.

    loaded = memjax.load("HuggingFaceTB/SmolLM2-135M")
    state = loaded.model.init_state(1)
    state, logits = loaded.model(state, loaded.tokenizer.encode("It was")[None])
    memjax.save_memory("memory", loaded.model, state)
    state = memjax.load_memory("memory", loaded.model)

Packages are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memjax.models.checkpoints.memory_state import load_memory as load_memory
    from memjax.models.checkpoints.memory_state import save_memory as save_memory
    from memjax.training.loading import Loaded as Loaded
    from memjax.training.loading import load as load

#: Also of the distribution: pyproject.toml reads it here.
__version__ = "0.2.0"

_PACKAGES = (
    "aot",
    "buckets",
    "cli",
    "conversation",
    "data",
    "evaluation",
    "mechanisms",
    "models",
    "nnx",
    "training",
)
#: Functions and classes, with the module that defines each.
_MODULES = {
    "Loaded": "memjax.training.loading",
    "load": "memjax.training.loading",
    "load_memory": "memjax.models.checkpoints.memory_state",
    "save_memory": "memjax.models.checkpoints.memory_state",
}


def __getattr__(name: str) -> Any:
    """Imports on first use: `memjax --help` needs no JAX."""
    if name in _PACKAGES:
        return importlib.import_module(f"memjax.{name}")
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'memjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return ["__version__", *_PACKAGES, *_MODULES]
