"""Save and restore a memory state, bit-exactly.

    state = model.inject(model.init_state(1), book)
    save_memory("after-the-book", model, state)
    state = load_memory("after-the-book", model)

A saved memory is a folder of two files: `memory.safetensors` holds every leaf of the
state under its path in the tree, without a margin of zeros, so that the file is as
large as the filled part of the memory; `memory.json` the model's class, sizes and
settings, a fingerprint of its parameters and of its tokenizer, where in its leaf each
saved part begins, a note of the caller's, and the sha256 of the other file and of
itself. Loading checks them all. Nothing that is read is executed.
"""

import contextlib
import hashlib
import inspect
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import safetensors.numpy
from jaxtyping import PyTree

from memjax.buckets.bucket import on_disk
from memjax.buckets.writing import atomic_folder
from memjax.checks import joined, listed, require_instance, short
from memjax.config_io import read_bounded, require_regular, to_record
from memjax.data.documents.tokenizer import Tokenizer
from memjax.models.base import Model
from memjax.models.checkpoints.fingerprint import fingerprints, require_fingerprints
from memjax.models.checkpoints.hf.safetensors_file import (
    SafetensorsFile,
    read_object,
)
from memjax.models.checkpoints.own_format import leaf_name, leaves_of

TENSORS, RECORD = "memory.safetensors", "memory.json"
# Version 1 held whole leaves; version 2 neither notes nor caches that had grown;
# version 3 no fingerprints.
FORMAT, VERSION = "memjax memory", 4
# Number formats of states, as safetensors names them.
NUMBER_FORMATS = ("F32", "BF16", "F16", "I32", "U32", "BOOL")
# Settings that change how a model computes and not what: they may differ.
IGNORED_SETTINGS = (
    "remat",
    "remat_saves",
    "activations",
    "store_memory",
    "pool_memory",
)


class PackedMemory(NamedTuple):
    """Content of a memory's folder.

    Attributes:
        tensors: the part of each leaf that holds something.
        record: the content of `memory.json`, but for the digests.
    """

    tensors: dict[str, np.ndarray]
    record: dict[str, Any]


def save_memory(
    folder: Path | str,
    model: Model,
    state: PyTree,
    *,
    note: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Writes a memory to a folder, which appears whole or not at all.

    Args:
        folder: must not exist, or be empty.
        model: the memory's model.
        state: of `model.init_state`, or any call of the model after it.
        note: what else is to be known of the memory, for `read_note`: a JSON object.
        tokenizer: of the texts in the memory, for `load_memory` to compare.

    Raises:
        ValueError: naming the leaf that is not as in `model.init_state`; if the folder
            is not empty. OSError: the folder could not
            be written.
    """
    write_memory(folder, pack_memory(model, state, note=note, tokenizer=tokenizer))


def pack_memory(
    model: Model,
    state: PyTree,
    *,
    note: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
) -> PackedMemory:
    """Content that `save_memory` writes; needs no disk. Raises ValueError as it
    does."""
    require_instance("model", model, Model)
    require_instance("note", note or {}, Mapping)
    leaves = _leaves_by_name(state)
    slots = _grown_slots(model, leaves)
    empty = _abstract_state(model, leaves, slots)
    _require_leaves(_kinds(leaves), _kinds(_leaves_by_name(empty)), "state")
    tensors, starts = {}, {}
    for name, leaf in leaves.items():
        value = np.asarray(leaf)
        held = _held(value)
        starts[name] = [part.start for part in held]
        # safetensors writes an array's buffer, ignoring its strides.
        tensors[name] = np.ascontiguousarray(value[held])
    record = {"format": FORMAT, "version": VERSION, "model": _describe(model)}
    record |= fingerprints(model, tokenizer)
    record |= {"slots": slots, "starts": starts, "note": dict(note or {})}
    try:
        json.dumps(record)
    except TypeError as error:
        raise ValueError(f"note must be a JSON object: {error}") from error
    return PackedMemory(tensors, record)


def write_memory(folder: Path | str, packed: PackedMemory) -> None:
    """Writes a packed memory; needs no JAX. Raises as `save_memory` does."""
    with atomic_folder(on_disk(folder)) as temporary:
        _write_tensors(packed.tensors, temporary / TENSORS)
        record = packed.record | {"sha256": _digest(temporary / TENSORS)}
        record |= {"record_sha256": _record_digest(record)}
        (temporary / RECORD).write_text(json.dumps(record, indent=1))
        # The library makes its files for the owner alone.
        shutil.copymode(temporary / RECORD, temporary / TENSORS)


def delete_memory(folder: Path) -> None:
    """Deletes the files of `save_memory`, and the folder unless it has others."""
    for name in (RECORD, TENSORS):
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def load_memory(
    folder: Path | str, model: Model, *, tokenizer: Tokenizer | None = None
) -> PyTree:
    """The state of `save_memory`, bit for bit.

    Args:
        folder: of `save_memory`; not trusted.
        model: of the same class, settings, sizes and parameters. Settings that change
            no result may differ, such as where the memory is stored.
        tokenizer: of the texts that the model will read; compared with that of
            `save_memory` where both were given.

    Raises:
        ValueError: naming what differs, if the memory is of another version, model,
            setting, parameters or tokenizer, or a file is damaged. OSError: no such
            folder.
    """
    folder = on_disk(folder)
    record = _read_record(folder)
    # Settings before arrays: they say why shapes differ.
    _require_same(record["model"], _describe(model), str(folder / RECORD))
    require_fingerprints(record, model, tokenizer, str(folder / RECORD))
    file = folder / TENSORS
    require_regular(file)
    # Before the file is parsed: a damaged header is not looked into.
    if _digest(file) != record["sha256"]:
        raise ValueError(f"{file} is not what was written: its sha256 differs")
    tensors = SafetensorsFile(file, NUMBER_FORMATS)
    parts = {name: tensors.get_unconverted(name) for name in tensors.shapes}
    empty = _abstract_state(model, parts, record["slots"])
    expected, where = _leaves_by_name(empty), str(file)
    _require_leaves(_formats(parts), _formats(expected), where)
    values = {
        name: _around(parts[name], record["starts"].get(name), leaf.shape, name, where)
        for name, leaf in expected.items()
    }

    def read(path, leaf):
        return jax.device_put(values[leaf_name(path)], leaf.memory_space)

    return jax.tree_util.tree_map_with_path(read, empty)


def read_note(folder: Path | str) -> dict[str, Any]:
    """The note that `save_memory` was given; {} without one.

    Raises:
        ValueError: as `load_memory`, of `memory.json` alone. OSError: no such folder.
    """
    return _read_record(Path(folder))["note"]


def _write_tensors(tensors: Mapping[str, np.ndarray], file: Path) -> None:
    """Raises OSError where the file cannot be written, as on a full disk."""
    try:
        safetensors.numpy.save_file(dict(tensors), file)
    except safetensors.SafetensorError as error:
        raise OSError(f"{file} could not be written: {error}") from error


def _held(value: np.ndarray) -> tuple[slice, ...]:
    """The smallest box of nonzero elements, for whole batch elements."""
    # By bits, as a negative zero is no zero of an empty state.
    bits = value.view(f"u{value.dtype.itemsize}") != 0
    held = [slice(0, value.shape[0])]
    for axis in range(1, value.ndim):
        others = tuple(i for i in range(value.ndim) if i != axis)
        (some,) = np.nonzero(bits.any(axis=others))
        held.append(
            slice(int(some[0]), int(some[-1]) + 1) if some.size else slice(0, 0)
        )
    return tuple(held)


def _around(
    part: np.ndarray, starts: Any, shape: tuple[int, ...], name: str, where: str
) -> np.ndarray:
    """The leaf of this shape: a saved part, padded with zeros."""
    fits = (
        isinstance(starts, list)
        and len(starts) == part.ndim == len(shape)
        and all(type(start) is int and start >= 0 for start in starts)
        and all(a + n <= m for a, n, m in zip(starts, part.shape, shape, strict=True))
        and part.shape[:1] == shape[:1]
    )
    if not fits:
        raise ValueError(
            f"{where}: {name!r} has the shape {list(part.shape)} and begins at "
            f"{short(starts)}, which is not inside of {list(shape)}"
        )
    if part.shape == shape:
        return part
    whole = np.zeros(shape, part.dtype)
    whole[tuple(slice(a, a + n) for a, n in zip(starts, part.shape, strict=True))] = (
        part
    )
    return whole


def _read_record(folder: Path) -> dict[str, Any]:
    file = folder / RECORD
    record = read_object(read_bounded(file), str(file))
    if record.get("format") != FORMAT:
        raise ValueError(
            f"{file}: format must be {FORMAT!r}, got {short(record.get('format'))}"
        )
    if record.get("version") != VERSION:
        raise ValueError(
            f"{file}: version must be {VERSION}, which this memjax reads, got "
            f"{short(record.get('version'))}"
        )
    kinds: dict[str, tuple[type, ...]] = {"format": (str,), "version": (int,)}
    kinds |= {"model": (dict,), "slots": (int, type(None)), "starts": (dict,)}
    kinds |= {"parameters": (str,), "tokenizer": (str, type(None))}
    kinds |= {"note": (dict,), "sha256": (str,), "record_sha256": (str,)}
    wrong = [n for n, kind in kinds.items() if type(record.get(n, ...)) not in kind]
    wrong += [name for name in record if name not in kinds]
    if wrong:
        raise ValueError(
            f"{file}: missing, unknown or of another type: {listed(wrong)}"
        )
    if _record_digest(record) != record["record_sha256"]:
        raise ValueError(f"{file} is not what was written: its sha256 differs")
    if record["slots"] is not None and record["slots"] < 1:
        raise ValueError(f"{file}: slots must be at least 1, got {record['slots']}")
    return record


def _record_digest(record: Mapping[str, Any]) -> str:
    """The sha256 of a record without its own entry."""
    content = {n: value for n, value in record.items() if n != "record_sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _grown_slots(model: Model, leaves: Mapping[str, Any]) -> int | None:
    """Slots of caches that have grown or shrunk; None without."""
    empty = _leaves_by_name(_abstract_state(model, leaves, None))

    def slots(leaf):
        return getattr(leaf, "shape", ())[1:2]

    grown = [slots(x) for n, x in leaves.items() if n in empty]
    new = [slots(empty[n]) for n in leaves if n in empty]
    found = [a for a, b in zip(grown, new, strict=True) if a and a != b]
    return max(found)[0] if found else None


def _abstract_state(
    model: Model, leaves: Mapping[str, Any], slots: int | None
) -> PyTree:
    """Shape, dtype and memory space of the leaves of an empty state like this one."""
    shapes = [leaf.shape for leaf in leaves.values() if getattr(leaf, "shape", ())]
    if not shapes:
        raise ValueError(
            f"state must have leaves with the batch first, got {[*leaves]}"
        )
    # HMT's states for padded texts have a leaf that the others lack.
    takes_masks = "masked" in inspect.signature(model.init_state).parameters
    options = {"masked": True} if takes_masks and "visible" in leaves else {}

    def init():
        return model.init_state(shapes[0][0], slots, **options)

    avals = jax.make_jaxpr(init)().out_avals
    return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(init)), avals)


def _leaves_by_name(state: PyTree) -> dict[str, Any]:
    return {leaf_name(path): leaf for path, leaf in leaves_of(state)}


def _kinds(leaves: Mapping[str, Any]) -> dict[str, str]:
    """Number format and shape of each leaf, as in `float32[1, 8]`."""
    return {name: f"{x.dtype}{list(x.shape)}" for name, x in leaves.items()}


def _formats(leaves: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(x.dtype) for name, x in leaves.items()}


def _require_leaves(
    found: Mapping[str, str], expected: Mapping[str, str], where: str
) -> None:
    """Raises one ValueError for all missing, unknown and differing leaves."""
    wrong = [f"{n!r} is missing" for n in expected if n not in found]
    wrong += [f"{short(n)} is not of this model" for n in found if n not in expected]
    wrong += [
        f"{name!r} is {found[name]}, expected {kind}"
        for name, kind in expected.items()
        if name in found and found[name] != kind
    ]
    if wrong:
        raise ValueError(f"{where}: {len(wrong)} wrong leaves: {joined(wrong)}")


def _describe(model: Model) -> dict[str, Any]:
    """Settings that a memory depends on: class, memory and backbone."""
    found: dict[str, Any] = {"class": type(model).__name__}
    if (config := getattr(model, "config", None)) is not None:
        found["config"] = {
            k: v for k, v in to_record(config).items() if k not in IGNORED_SETTINGS
        }
    # A plain model is its own backbone.
    if (backbone := getattr(model, "backbone", model)) is not model:
        found["backbone"] = _describe(backbone)
    # Tuples become lists, as in the file that this is compared with.
    return json.loads(json.dumps(found))


def _require_same(
    saved: Mapping[str, Any], here: Mapping[str, Any], where: str
) -> None:
    """Raises one ValueError for all settings that differ."""
    saved, here = dict(_settings("", saved)), dict(_settings("", here))
    # A setting that is absent differs from one that is None.
    none = object()
    wrong = [
        f"{name} is {short(saved.get(name, 'absent'))} in the memory and "
        f"{short(here.get(name, 'absent'))} in the model"
        # A model's own settings before its parts', as the message may be cut.
        for name in sorted(saved.keys() | here.keys(), key=lambda n: (n.count("."), n))
        if saved.get(name, none) != here.get(name, none)
    ]
    if wrong:
        raise ValueError(f"{where} is of another model: {joined(wrong)}")


def _settings(prefix: str, record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _settings(f"{prefix}{name}.", value)
        else:
            yield prefix + name, value


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
