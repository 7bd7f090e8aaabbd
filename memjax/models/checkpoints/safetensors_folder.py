"""Folders of `config.json`, safetensors and `tokenizer.json`, as Hugging Face has them.

What is read is not trusted: nothing in a folder is executed, pickled weights are
refused, and every name, place and number format is checked before a tensor is used.
"""

import contextlib
import json
import os
import shutil
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float32

from memjax.models.language_model.config import Dtype

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
READ_DTYPES = ("F32", "F16", "BF16")
NO_OTHERS: Mapping[str, str] = types.MappingProxyType({})
SAVED_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class SafetensorsFile:
    """One file of tensors.

    Attributes:
        path: of the file.
        shapes: of the tensors, by name.
    """

    def __init__(
        self,
        path: Path,
        formats: tuple[str, ...] = READ_DTYPES,
        others: Mapping[str, str] = NO_OTHERS,
    ):
        """Reads the header; tensors are read one by one, when asked for.

        Args:
            path: of the file.
            formats: of numbers that may occur, as safetensors names them.
            others: one more format for tensors of these names, such as flags.

        Raises:
            ValueError: if the header is not whole and true, names a tensor twice, or
                has another number format; without the safetensors package; OSError: no
                file.
        """
        safetensors = library()
        self.path = path
        try:
            # Holds the header against the file: no gap, overlap or byte too many.
            self._file = safetensors.safe_open(path, "numpy")
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from error
        # The library takes the last of two tensors with one name.
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            read_object(file.read(size), f"{path}: header")
        self.shapes = {}
        for name in self._file.keys():
            part = self._file.get_slice(name)
            allowed = (*formats, others[name]) if name in others else formats
            if part.get_dtype() not in allowed:
                raise ValueError(
                    f"{path}: tensor {name!r} has the number format "
                    f"{part.get_dtype()}, expected one of {allowed}"
                )
            self.shapes[name] = tuple(part.get_shape())

    def get(self, name: str) -> Float32[np.ndarray, "..."]:
        """One tensor in float32, which holds the other formats of floats exactly."""
        return self.get_as_it_is(name).astype(np.float32, copy=False)

    def get_as_it_is(self, name: str) -> np.ndarray:
        """One tensor in the file's number format."""
        return self._file.get_tensor(name)


class SafetensorsFolder:
    """Configuration and tensors of a folder.

    Attributes:
        path: of the folder.
        config: what `config.json` holds.
        shapes: of the tensors, by name.
    """

    def __init__(self, path: Path, others: Mapping[str, str] = NO_OTHERS):
        """Reads configuration, index and headers.

        Args:
            path: of the folder.
            others: see `SafetensorsFile`.

        Raises:
            ValueError: if the configuration is missing or brings its own code, weights
                are missing, pickled or outside the folder, or index and files
                disagree; or as `SafetensorsFile`.
        """
        self.path = path
        self.config = _read_config(path)
        self._files = list(_open_files(path, others))
        self._place = {name: file for file in self._files for name in file.shapes}
        self.shapes = {n: file.shapes[n] for n, file in self._place.items()}

    def get(self, name: str) -> Float32[np.ndarray, "..."]:
        """One tensor in float32."""
        return self._place[name].get(name)

    def tokenizer(self) -> bytes | None:
        """The bytes of `tokenizer.json`, None without one."""
        if not (self.path / TOKENIZER).exists():
            return None
        return _inside(self.path, TOKENIZER).read_bytes()


def read_object(raw: bytes, what: str) -> dict[str, Any]:
    """Parses a JSON object; ValueError if it is not one, or repeats a key."""

    def unique(pairs):
        result = dict(pairs)
        if len(result) < len(pairs):
            names = [name for name, _ in pairs]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"{twice} given twice")
        return result

    try:
        found = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not sound JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{what} must be a JSON object, got {type(found).__name__}")
    return found


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, np.ndarray]],
    tokenizer: bytes | None,
    *,
    dtype: Dtype = "float32",
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a folder that this module and Hugging Face's libraries read.

    It appears whole or not at all. Beyond `shard_bytes` the tensors go to several
    files and an index; no more than one file's tensors are held at a time.

    Args:
        folder: must not exist, or be empty.
        config: of `config.json`; `torch_dtype` is added.
        tensors: names and values; uint8 is a flag, and stays what it is.
        tokenizer: bytes of `tokenizer.json`.
        dtype: of the other saved numbers.
        shard_bytes: largest file, unless one tensor alone is larger; at least 1.

    Raises:
        ValueError: if the folder holds something, or a tensor is given twice.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes must be at least 1, got {shard_bytes}")
    with whole_or_nothing(folder) as hidden:
        _write_tensors(hidden, tensors, SAVED_DTYPES[dtype], shard_bytes)
        record = json.dumps(dict(config) | {"torch_dtype": dtype}, indent=2)
        (hidden / CONFIG).write_text(record)
        if tokenizer is not None:
            (hidden / TOKENIZER).write_bytes(tokenizer)
            # Else transformers would rebuild one of the model's family.
            general = {"tokenizer_class": "PreTrainedTokenizerFast"}
            (hidden / "tokenizer_config.json").write_text(json.dumps(general))
        for file in hidden.glob("*.safetensors"):
            # The library makes them for the owner alone.
            shutil.copymode(hidden / CONFIG, file)


@contextlib.contextmanager
def whole_or_nothing(folder: Path) -> Iterator[Path]:
    """A folder to write in, which takes the name of `folder` when all is on the disk.

    Raises:
        ValueError: if `folder` holds something.
    """
    require_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    hidden = folder.with_name(f".{folder.name}.{os.getpid()}")
    hidden.mkdir()
    try:
        yield hidden
        for file in hidden.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        hidden.replace(folder)
    except BaseException:
        shutil.rmtree(hidden)
        raise


def require_free(folder: Path) -> None:
    """Raises ValueError unless a folder can be written there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already and is not an empty folder")


def require_no_pickle(file: Path) -> None:
    """Raises ValueError for the suffixes of pickled weights, with advice."""
    if file.suffix in PICKLED:
        raise ValueError(
            f"{file} is a pickle, which runs code when it is loaded, and is not read: "
            "have the library that wrote it save safetensors"
        )


def _read_config(folder: Path) -> dict[str, Any]:
    file = _inside(folder, CONFIG)
    config = read_object(file.read_bytes(), str(file))
    if config.get("auto_map"):
        raise ValueError(
            f"{file} names code of its own (auto_map={config['auto_map']!r}); "
            "nothing from a checkpoint is executed"
        )
    return config


def _open_files(folder: Path, others: Mapping[str, str]) -> Iterator[SafetensorsFile]:
    """The single file, or those of the index."""
    if (folder / SINGLE).exists():
        yield SafetensorsFile(_inside(folder, SINGLE), others=others)
    elif (folder / INDEX).exists():
        index = _inside(folder, INDEX)
        places = _read_index(index)
        yield from _open_shards(folder, index, places, others)
    else:
        for file in sorted(folder.iterdir()):
            require_no_pickle(file)
        raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}")


def _read_index(index: Path) -> dict[str, str]:
    """Tensor name -> file name, which may not lead out of the folder."""
    places = read_object(index.read_bytes(), str(index)).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{index}: weight_map must map tensors to files")
    for name, shard in places.items():
        plain = isinstance(shard, str) and PurePosixPath(shard).name == shard
        if not plain or "\\" in shard or not shard.endswith(".safetensors"):
            raise ValueError(
                f"{index}: tensor {name!r} lies in {shard!r}; expected the plain name "
                "of a .safetensors file in the same folder"
            )
    return places


def _open_shards(
    folder: Path, index: Path, places: dict[str, str], others: Mapping[str, str]
) -> Iterator[SafetensorsFile]:
    wrong = []
    for shard in sorted(set(places.values())):
        file = SafetensorsFile(_inside(folder, shard), others=others)
        listed = {name for name, place in places.items() if place == shard}
        wrong += [f"{shard} lacks {n!r}" for n in sorted(listed - file.shapes.keys())]
        for name in sorted(file.shapes.keys() - listed):
            said = places.get(name)
            where = f"which the index puts in {said}" if said else "not in the index"
            wrong.append(f"{shard} holds {name!r}, {where}")
        yield file
    if wrong:
        raise ValueError(f"{index} and its files disagree: {'; '.join(wrong)}")


def _inside(folder: Path, name: str) -> Path:
    """The file of a folder; not one that a link puts elsewhere.

    The cache of huggingface_hub is an exception that is known: its snapshots are links
    to the blobs beside them.
    """
    file = folder / name
    if not file.is_file():
        raise ValueError(f"{folder} has no file {name}")
    root = folder.resolve()
    blobs = [root.parents[1] / "blobs"] if root.parent.name == "snapshots" else []
    if not any(file.resolve().is_relative_to(place) for place in (root, *blobs)):
        raise ValueError(f"{file} is a link to {file.resolve()}, outside its folder")
    return file


def library() -> Any:
    """The optional package safetensors; ValueError without it."""
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ValueError(
            "safetensors files need the optional package safetensors: "
            "pip install safetensors"
        ) from error
    return safetensors


def _write_tensors(
    folder: Path,
    tensors: Iterable[tuple[str, np.ndarray]],
    dtype: np.dtype,
    shard_bytes: int,
) -> None:
    save_file = library().numpy.save_file
    places: dict[str, int] = {}
    shard, size, count, total = {}, 0, 0, 0

    def flush():
        # The number of files is not known yet, and is part of their names.
        save_file(shard, folder / f"{count}.part", metadata={"format": "pt"})

    for name, value in tensors:
        if name in places:
            raise ValueError(f"tensor {name!r} is given twice")
        value = np.asarray(value, order="C")
        value = value if value.dtype == np.uint8 else value.astype(dtype, copy=False)
        if shard and size + value.nbytes > shard_bytes:
            flush()
            shard, size, count = {}, 0, count + 1
        shard[name], places[name] = value, count
        size, total = size + value.nbytes, total + value.nbytes
    flush()
    if count == 0:
        (folder / "0.part").rename(folder / SINGLE)
        return
    names = [
        f"model-{i + 1:05}-of-{count + 1:05}.safetensors" for i in range(count + 1)
    ]
    for i, name in enumerate(names):
        (folder / f"{i}.part").rename(folder / name)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: names[place] for name, place in places.items()},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2))
