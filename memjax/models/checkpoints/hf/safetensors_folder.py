"""Reads folders of `config.json`, safetensors and `tokenizer.json`, as Hugging Face's.

Folders are not trusted: nothing in one is executed, pickled weights are
refused, and every name, path and number format is checked before a tensor is used.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from jaxtyping import Float32

from memjax.checks import joined, short
from memjax.config_io import AnyPath, read_bounded
from memjax.models.checkpoints.hf.safetensors_file import (
    NO_OTHERS,
    SafetensorsFile,
    read_object,
)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
CHAT_TEMPLATE, CHAT_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
#: Files of a tokenizer and its use, besides the folder of further templates.
TEXT_FILES = (
    *(TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, CHAT_TEMPLATE, GENERATION),
    # Read by transformers beside tokenizer.json.
    *("added_tokens.json", "vocab.json", "merges.txt"),
)
CARD = "README.md"
#: Texts of licences, which are written on with a model.
LICENSES = (
    *("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "NOTICE.md"),
    "USE_POLICY.md",
)
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class SafetensorsFolder:
    """Configuration and tensors of a folder."""

    def __init__(self, path: Path, others: Mapping[str, str] = NO_OTHERS):
        """Reads configuration, index and headers.

        Args:
            path: of the folder.
            others: see `SafetensorsFile`.

        Raises:
            ValueError: if the configuration is missing or names its own code, weights
                are missing, pickled or outside the folder, or index and files
                disagree; or as `SafetensorsFile`.
        """
        self.path = path
        self.config = read_model_config(path)
        self._files = list(_open_files(path, others))
        self._file_of = {name: file for file in self._files for name in file.shapes}
        self.shapes = {n: file.shapes[n] for n, file in self._file_of.items()}

    def get(self, name: str) -> Float32[np.ndarray, "..."]:
        """One tensor in float32."""
        return self._file_of[name].get(name)

    def get_compact(self, name: str) -> np.ndarray:
        """One tensor in bfloat16 if the files have it so, else in float32."""
        return self._file_of[name].get_compact(name)


def read_inside(folder: AnyPath, name: str) -> bytes | None:
    """The bytes of a folder's file, None without one.

    Raises:
        ValueError: if it is a link out of the folder.
    """
    if not (folder / name).exists():
        return None
    # A bucket has no links.
    file = inside(folder, name) if isinstance(folder, Path) else folder / name
    return read_bounded(file)


def require_no_pickle(file: Path) -> None:
    """Raises ValueError for the suffixes of pickled weights, with advice."""
    if file.suffix in PICKLED:
        raise ValueError(
            f"{file} is a pickle, which runs code when it is loaded, and is not read: "
            "have the library that wrote it save safetensors"
        )


def read_model_config(folder: Path) -> dict[str, Any]:
    """The content of `config.json`.

    Raises:
        ValueError: if it is missing, no sound JSON object, or names its own code.
    """
    file = inside(folder, CONFIG)
    config = read_object(read_bounded(file), str(file))
    # Such a model needs its own Python code, which is not run here.
    if config.get("auto_map"):
        raise ValueError(
            f"{file} names code of its own (auto_map={short(config['auto_map'])}); "
            "nothing from a checkpoint is executed"
        )
    return config


def _open_files(folder: Path, others: Mapping[str, str]) -> Iterator[SafetensorsFile]:
    """The single file, or those of the index."""
    if (folder / SINGLE).exists():
        yield SafetensorsFile(inside(folder, SINGLE), others=others)
    elif (folder / INDEX).exists():
        index = inside(folder, INDEX)
        file_of = read_index(index)
        yield from _open_shards(folder, index, file_of, others)
    else:
        # A folder with pickles alone gets the advice for pickles.
        for file in sorted(folder.iterdir()):
            require_no_pickle(file)
        raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}")


def read_index(index: Path) -> dict[str, str]:
    """Tensor name -> file name, which may not lead out of the folder."""
    file_of = read_object(read_bounded(index), str(index)).get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise ValueError(f"{index}: weight_map must map tensors to files")
    for name, shard in file_of.items():
        # A plain name: an index must not lead to files outside of its folder.
        plain = isinstance(shard, str) and PurePosixPath(shard).name == shard
        if not plain or "\\" in shard or not shard.endswith(".safetensors"):
            raise ValueError(
                f"{index}: tensor {short(name)} is in {short(shard)}; expected the "
                "plain name of a .safetensors file in the same folder"
            )
    return file_of


def _open_shards(
    folder: Path, index: Path, file_of: dict[str, str], others: Mapping[str, str]
) -> Iterator[SafetensorsFile]:
    wrong = []
    for shard in sorted(set(file_of.values())):
        file = SafetensorsFile(inside(folder, shard), others=others)
        told = {name for name, found in file_of.items() if found == shard}
        wrong += [
            f"{shard} lacks {short(n)}" for n in sorted(told - file.shapes.keys())
        ]
        for name in sorted(file.shapes.keys() - told):
            other = file_of.get(name)
            where = f"which the index puts in {other}" if other else "not in the index"
            wrong.append(f"{shard} holds {short(name)}, {where}")
        yield file
    if wrong:
        raise ValueError(f"{index} and its files disagree: {joined(wrong)}")


def inside(folder: Path, name: str) -> Path:
    """The file of a folder; ValueError if it is a link out of it, but of weights."""
    file = folder / name
    if not file.is_file():
        raise ValueError(f"{folder} has no file {name}")
    # A folder from elsewhere could link config.json or tokenizer.json to any file of
    # its reader, whose text would get into messages and exports. Weights, which may be
    # on another disk, are used only if all their tensors are those of the model. In
    # the cache of huggingface_hub files are links to the neighbour folder `blobs`.
    if name.endswith(".safetensors"):
        return file
    root = folder.resolve()
    cached = root.parent.name == "snapshots"
    blobs = [(root.parents[1] / "blobs").resolve()] if cached else []
    if not any(file.resolve().is_relative_to(allowed) for allowed in (root, *blobs)):
        raise ValueError(f"{file} is a link to {file.resolve()}, outside its folder")
    return file
