"""Writes folders of `config.json`, safetensors and other files, as Hugging Face's.

A folder appears under its name only when all of its files are on the disk.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from memjax.buckets.writing import atomic_folder
from memjax.models.checkpoints.hf.safetensors_folder import CONFIG, INDEX, SINGLE
from memjax.models.language_model.config import Dtype

SAVED_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, np.ndarray]],
    files: Mapping[str, bytes],
    *,
    dtype: Dtype = "float32",
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a folder that `SafetensorsFolder` and Hugging Face's libraries read.

    Tensors of more than `shard_bytes` go to several files and an index; no more than
    one file's tensors are in memory at a time.

    Args:
        folder: must not exist, or be empty.
        config: content of `config.json`; `torch_dtype` is added.
        tensors: names and values; uint8 tensors are flags, whose dtype stays.
        files: the other files, by name.
        dtype: of the other saved tensors.
        shard_bytes: size of the largest file, unless one tensor alone is larger; at
            least 1.

    Raises:
        ValueError: if the folder is not empty, or a tensor is given twice.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes must be at least 1, got {shard_bytes}")
    with atomic_folder(folder) as temporary:
        _write_tensors(temporary, tensors, SAVED_DTYPES[dtype], shard_bytes)
        record = json.dumps(dict(config) | {"torch_dtype": dtype}, indent=2)
        (temporary / CONFIG).write_text(record)
        for name, content in files.items():
            (temporary / name).parent.mkdir(exist_ok=True)
            (temporary / name).write_bytes(content)
        for file in temporary.glob("*.safetensors"):
            # The library makes files that only their owner may read.
            shutil.copymode(temporary / CONFIG, file)


def _write_tensors(
    folder: Path,
    tensors: Iterable[tuple[str, np.ndarray]],
    dtype: np.dtype,
    shard_bytes: int,
) -> None:
    save_file = safetensors.numpy.save_file
    shard_of: dict[str, int] = {}
    shard, size, count, total = {}, 0, 0, 0

    def flush():
        # The number of files is not known yet, and is part of their names.
        save_file(shard, folder / f"{count}.part", metadata={"format": "pt"})

    for name, value in tensors:
        if name in shard_of:
            raise ValueError(f"tensor {name!r} is given twice")
        # safetensors writes an array's buffer, ignoring its strides.
        value = np.asarray(value, order="C")
        value = value if value.dtype == np.uint8 else value.astype(dtype, copy=False)
        if shard and size + value.nbytes > shard_bytes:
            flush()
            shard, size, count = {}, 0, count + 1
        shard[name], shard_of[name] = value, count
        size, total = size + value.nbytes, total + value.nbytes
    flush()
    _name_shards(folder, shard_of, count + 1, total)


def _name_shards(
    folder: Path, shard_of: Mapping[str, int], count: int, total_bytes: int
) -> None:
    """Gives `count` written files their final names, and several of them an index."""
    if count == 1:
        (folder / "0.part").rename(folder / SINGLE)
        return
    files = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for i, file in enumerate(files):
        (folder / f"{i}.part").rename(folder / file)
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": {name: files[i] for name, i in shard_of.items()},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2))
