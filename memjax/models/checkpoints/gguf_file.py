"""GGUF files: header, metadata and tensors, read without executing or trusting them.

The header is little-endian: magic, version, number of tensors and of metadata entries,
the entries, one record a tensor; then the tensors, aligned
(https://github.com/ggml-org/ggml, docs/gguf.md). Every count and offset is held against
the size of the file before it is believed.
"""

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memjax.models.checkpoints import gguf_blocks

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
# Value type of the metadata -> little-endian NumPy dtype.
SCALARS = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
# The least bytes that an entry of the metadata, and the record of a tensor, can take.
LEAST_ENTRY, LEAST_RECORD = 13, 24
MOST_DIMENSIONS = 4


class TensorRecord(NamedTuple):
    """Where a tensor lies. Shapes are row-major: GGUF's own order reversed."""

    shape: tuple[int, ...]
    kind: int
    start: int
    size: int


class GGUFFile:
    """Metadata and tensors of one file.

    Attributes:
        path: of the file.
        metadata: key to int, float, bool, str, list of str or NumPy array.
        records: tensor name to its place in the file.
    """

    def __init__(self, path: Path):
        """Reads the header; tensors are read one by one, when asked for.

        Raises:
            ValueError: if the file is not GGUF of version 2 or 3, or cut short, or its
                counts, offsets, names or types cannot be true; OSError: no file.
        """
        self.path = path
        with path.open("rb") as file:
            if file.seek(0, 2) < 24:
                raise ValueError(f"{path} is not a GGUF file: shorter than its header")
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(self._bytes, path)
        tensors, entries = _read_counts(cursor)
        self.metadata = _read_metadata(cursor, entries)
        self.records = _read_records(cursor, tensors, _alignment(self.metadata, path))

    def read(self, name: str) -> np.ndarray:
        """A tensor in float32, dequantised."""
        record = self.records[name]
        raw = np.frombuffer(self._bytes, np.uint8, record.size, record.start)
        return gguf_blocks.to_float32(raw, record.kind).reshape(record.shape)


class _Cursor:
    """Reads forward through the header; nothing beyond the file's end."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path, self.at = data, path, len(MAGIC)

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, size: int, what: str) -> bytes:
        if size > self.left:
            raise ValueError(
                f"{self.path}: {what} needs {size} bytes at byte {self.at}, "
                f"the file has {self.left} more"
            )
        self.at += size
        return self.data[self.at - size : self.at]

    def unpack(self, layout: str, what: str) -> tuple[Any, ...]:
        record = struct.Struct(f"<{layout}")
        return record.unpack(self.take(record.size, what))

    def string(self, what: str) -> str:
        (length,) = self.unpack("Q", f"the length of {what}")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: {what} is not UTF-8: {error}") from error


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """Number of tensors and of metadata entries."""
    path = cursor.path
    if cursor.data[: len(MAGIC)] != MAGIC:
        raise ValueError(f"{path} is not a GGUF file: no magic number {MAGIC!r}")
    (version,) = cursor.unpack("I", "the version")
    if version not in VERSIONS:
        order = " (a big-endian file)" if version & 0xFFFF == 0 else ""
        raise ValueError(f"{path} is GGUF of version {version}{order}, not {VERSIONS}")
    tensors, entries = cursor.unpack("QQ", "the counts")
    least = tensors * LEAST_RECORD + entries * LEAST_ENTRY
    if least > cursor.left:
        raise ValueError(
            f"{path} claims {tensors} tensors and {entries} metadata entries, which "
            f"take {least} bytes at least; it has {cursor.left} more"
        )
    return tensors, entries


def _read_metadata(cursor: _Cursor, entries: int) -> dict[str, Any]:
    metadata = {}
    for _ in range(entries):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise ValueError(f"{cursor.path}: metadata {key!r} appears twice")
        (kind,) = cursor.unpack("I", f"the type of {key!r}")
        metadata[key] = _read_value(cursor, kind, f"metadata {key!r}")
    return metadata


def _read_value(cursor: _Cursor, kind: int, what: str) -> Any:
    if kind == STRING:
        return cursor.string(what)
    if kind in SCALARS:
        return _read_numbers(cursor, kind, 1, what)[0].item()
    if kind != ARRAY:
        raise ValueError(f"{cursor.path}: {what} has the unknown value type {kind}")
    item, length = cursor.unpack("IQ", f"the length of {what}")
    if item in SCALARS:
        return _read_numbers(cursor, item, length, what)
    if item != STRING:
        raise ValueError(f"{cursor.path}: {what} is an array of the type {item}")
    # Each string has at least its length of 8 bytes.
    if length * 8 > cursor.left:
        raise ValueError(
            f"{cursor.path}: {what} claims {length} strings, "
            f"the file has {cursor.left} more bytes"
        )
    return [cursor.string(what) for _ in range(length)]


def _read_numbers(cursor: _Cursor, kind: int, count: int, what: str) -> np.ndarray:
    dtype = SCALARS[kind]
    raw = cursor.take(dtype.itemsize * count, what)
    if kind == 7 and raw.strip(b"\0\1"):
        raise ValueError(f"{cursor.path}: {what} has booleans other than 0 and 1")
    return np.frombuffer(raw, dtype)


def _alignment(metadata: dict[str, Any], path: Path) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(
            f"{path}: general.alignment must be a power of two, got {alignment!r}"
        )
    return alignment


def _read_records(
    cursor: _Cursor, tensors: int, alignment: int
) -> dict[str, TensorRecord]:
    path, records = cursor.path, {}
    for _ in range(tensors):
        name = cursor.string("the name of a tensor")
        what = f"tensor {name!r}"
        if name in records:
            raise ValueError(f"{path}: {what} appears twice")
        (dimensions,) = cursor.unpack("I", f"the shape of {what}")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise ValueError(
                f"{path}: {what} has {dimensions} dimensions, "
                f"expected 1 to {MOST_DIMENSIONS}"
            )
        shape = cursor.unpack("Q" * dimensions, f"the shape of {what}")[::-1]
        kind, offset = cursor.unpack("IQ", f"the place of {what}")
        if offset % alignment:
            raise ValueError(
                f"{path}: {what} starts at offset {offset}, "
                f"expected a multiple of {alignment}"
            )
        size = gguf_blocks.size_in_bytes(shape, kind, f"{path}: {what}")
        records[name] = TensorRecord(shape, kind, offset, size)
    base = -(-cursor.at // alignment) * alignment
    return _placed(records, base, len(cursor.data), path)


def _placed(
    records: dict[str, TensorRecord], base: int, end: int, path: Path
) -> dict[str, TensorRecord]:
    """Offsets counted from the file's start; none beyond its end, none shared."""
    placed = {n: r._replace(start=base + r.start) for n, r in records.items()}
    before, taken = "", base
    for name, record in sorted(placed.items(), key=lambda item: item[1].start):
        if record.start + record.size > end:
            raise ValueError(
                f"{path}: tensor {name!r} {list(record.shape)} lies in bytes "
                f"{record.start} to {record.start + record.size}, the file has {end}: "
                "cut short, or not a GGUF file"
            )
        if record.start < taken:
            raise ValueError(f"{path}: tensors {before!r} and {name!r} overlap")
        before, taken = name, record.start + record.size
    return placed
