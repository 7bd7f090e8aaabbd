"""The licence of a pretrained model, as its model card or GGUF file gives it.

The entries are those of a card: `license`, and where it is "other" also `license_name`
and `license_link`. The texts of licences are files, which `TextInterface` carries on.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from memjax.config_io import AnyPath
from memjax.models.checkpoints.hf.safetensors_folder import CARD, read_inside

#: Of each entry, its key in GGUF's metadata and its allowed values.
_ENTRIES = {
    "license": ("general.license", r"[\w.-]{1,100}"),
    "license_name": ("general.license.name", r"[^\n\"\\]{1,200}"),
    "license_link": ("general.license.link", r"[^\s\"\\]{1,500}"),
}


def read_license(folder: AnyPath) -> dict[str, str]:
    """The entries at the head of a folder's model card; empty if there are none."""
    card = (read_inside(folder, CARD) or b"").decode(errors="replace")
    head = re.match(r"---\r?\n(.*?)\r?\n---", card, re.DOTALL)
    found = {}
    for name, (_, allowed) in _ENTRIES.items():
        # A list of one, too.
        line = rf"""^{name}:[ \t]*(?:\r?\n[ \t]*- *)?(["']?)({allowed})\1[ \t]*\r?$"""
        if head and (match := re.search(line, head[1], re.MULTILINE)):
            found[name] = match[2].strip()
    return found


def license_of_metadata(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The entries of the metadata of a GGUF file; empty if there are none."""
    values = {name: metadata.get(key) for name, (key, _) in _ENTRIES.items()}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, str) and re.fullmatch(_ENTRIES[name][1], value)
    }


def card_entries(found: Mapping[str, str]) -> list[str]:
    """The entries as lines of a card's head."""
    return [
        f"{name}: {text if name == 'license' else json.dumps(text, ensure_ascii=False)}"
        for name, text in found.items()
    ]


def described(found: Mapping[str, str]) -> str:
    """The licence in a few words."""
    if not found:
        return "unknown: the files of the model that it was made from name none"
    return ", ".join(found.values())
