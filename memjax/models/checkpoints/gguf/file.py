"""GGUF files: header, metadata and tensors, read without executing or trusting them.

The header is little-endian: magic, version, number of tensors and of metadata entries,
the entries, one record a tensor; then the tensors, aligned
(https://github.com/ggml-org/ggml, docs/gguf.md). Every count and offset is compared
with the size of the file before it is used. `gguf.GGUFReader` trusts them: it grows
lists by false counts, and cuts tensors of a short file without a word. So the
header is read here, and the package `gguf` is asked for number formats alone.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32

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
# Bytes that an entry of the metadata, and the record of a tensor, take at least.
MIN_ENTRY_BYTES, MIN_RECORD_BYTES = 13, 24
MAX_DIMENSIONS = 4


class TensorRecord(NamedTuple):
    """Position of a tensor in the file.

    Attributes:
        shape: row-major, GGUF's own order reversed.
        format: a `gguf.GGMLQuantizationType`.
        start: first byte.
        size: number of bytes.
    """

    shape: tuple[int, ...]
    format: Any
    start: int
    size: int


class GGUFFile:
    """Metadata and tensors of one file.

    Attributes:
        path: of the file.
        metadata: key to int, float, bool, str, list of str or NumPy array.
        records: tensor name to its position in the file.
    """

    def __init__(self, path: Path):
        """Reads the header; tensors are read one by one, when asked for.

        Raises:
            ValueError: if the file is not GGUF of version 2 or 3, or cut short, or its
                counts, offsets, names or types cannot be true; without the package
                gguf. OSError: no file.
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

    def is_precise(self, name: str) -> bool:
        """True for floats more precise than bfloat16, False for quantized tensors."""
        return self.records[name].format.name in ("F64", "F32", "F16")

    def read(self, name: str, expert: int | None = None) -> Float32[np.ndarray, "..."]:
        """A tensor in float32, dequantized; one matrix of those of all experts."""
        record = self.records[name]
        shape, start, size = record.shape, record.start, record.size
        if expert is not None:
            size //= shape[0]
            shape, start = shape[1:], start + expert * size
        stored = np.frombuffer(self._bytes, np.uint8, size, start)
        rows = stored.reshape(math.prod(shape[:-1]), -1)
        values = library().dequantize(rows, record.format).reshape(shape)
        # Float32 tensors are views of the file until here.
        return np.require(values, requirements="W")


def library() -> Any:
    """The optional package gguf; ValueError without it."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError(
            "GGUF files need the optional package gguf: pip install gguf"
        ) from error
    return gguf


class _Cursor:
    """Reads the header front to back, and never beyond the file's end."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path, self.offset = data, path, len(MAGIC)

    @property
    def remaining(self) -> int:
        return len(self.data) - self.offset

    def take(self, size: int, what: str) -> bytes:
        if size > self.remaining:
            raise ValueError(
                f"{self.path}: {what} needs {size} bytes at byte {self.offset}, "
                f"the file has {self.remaining} more"
            )
        self.offset += size
        return self.data[self.offset - size : self.offset]

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
    least = tensors * MIN_RECORD_BYTES + entries * MIN_ENTRY_BYTES
    if least > cursor.remaining:
        raise ValueError(
            f"{path} claims {tensors} tensors and {entries} metadata entries, which "
            f"take {least} bytes at least; it has {cursor.remaining} more"
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
    if length * 8 > cursor.remaining:
        raise ValueError(
            f"{cursor.path}: {what} claims {length} strings, "
            f"the file has {cursor.remaining} more bytes"
        )
    return [cursor.string(what) for _ in range(length)]


def _read_numbers(cursor: _Cursor, kind: int, count: int, what: str) -> np.ndarray:
    dtype = SCALARS[kind]
    raw = cursor.take(dtype.itemsize * count, what)
    # NumPy would take any byte for a boolean.
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
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ValueError(
                f"{path}: {what} has {dimensions} dimensions, "
                f"expected 1 to {MAX_DIMENSIONS}"
            )
        shape = cursor.unpack("Q" * dimensions, f"the shape of {what}")[::-1]
        kind, offset = cursor.unpack("IQ", f"the offset of {what}")
        if offset % alignment:
            raise ValueError(
                f"{path}: {what} starts at offset {offset}, "
                f"expected a multiple of {alignment}"
            )
        format, size = _size_in_bytes(shape, kind, f"{path}: {what}")
        records[name] = TensorRecord(shape, format, offset, size)
    base = -(-cursor.offset // alignment) * alignment
    return _absolute(records, base, len(cursor.data), path)


def _size_in_bytes(shape: tuple[int, ...], kind: int, what: str) -> tuple[Any, int]:
    """The number format of a tensor and its size.

    Quantized formats store blocks of a fixed number of values, which never cross the
    end of a row.

    Raises:
        ValueError: if the package gguf does not dequantize the format, or a row is not
            made of whole blocks.
    """
    gguf = library()
    try:
        format = gguf.GGMLQuantizationType(kind)
        block, block_bytes = gguf.GGML_QUANT_SIZES[format]
        # Raises for integers, and for formats that have a number and no decoder.
        gguf.dequantize(np.zeros((1, block_bytes), np.uint8), format)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ValueError(
            f"{what} has the number format {kind}, which is not a known "
            f"quantization: {error}"
        ) from error
    if min(shape) < 1:
        raise ValueError(f"{what} has the shape {list(shape)}, an axis of 0")
    if shape[-1] % block:
        raise ValueError(
            f"{what} has rows of {shape[-1]} values; {format.name} needs a multiple of "
            f"{block}"
        )
    return format, math.prod(shape) // block * block_bytes


def _absolute(
    records: dict[str, TensorRecord], base: int, end: int, path: Path
) -> dict[str, TensorRecord]:
    """Offsets from the file's start; tensors end inside the file and do not overlap."""
    absolute = {n: r._replace(start=base + r.start) for n, r in records.items()}
    before, before_end = "", base
    # In the order of the file, so that one pass finds every overlap.
    for name, record in sorted(absolute.items(), key=lambda item: item[1].start):
        if record.start + record.size > end:
            raise ValueError(
                f"{path}: tensor {name!r} {list(record.shape)} is in bytes "
                f"{record.start} to {record.start + record.size}, the file has {end}: "
                "cut short, or not a GGUF file"
            )
        if record.start < before_end:
            raise ValueError(f"{path}: tensors {before!r} and {name!r} overlap")
        before, before_end = name, record.start + record.size
    return absolute
