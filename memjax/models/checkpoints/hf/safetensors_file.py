"""One safetensors file: tensors by name, read without executing or trusting it."""

import collections
import os
import types
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
from jaxtyping import Float32

from memjax.checks import listed, short
from memjax.config_io import parse_json, require_regular

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT_FORMATS = ("F32", "F16", "BF16")
# Number formats as safetensors names them.
_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": BFLOAT16,
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
# Bytes. jax takes an array whose address is a multiple without copying it.
_ALIGNMENT = 64
NO_OTHERS: Mapping[str, str] = types.MappingProxyType({})


class SafetensorsFile:
    """One file of tensors.

    Attributes:
        path: of the file.
        shapes: of the tensors, by name.
        nbytes: of the tensors, by name.
    """

    def __init__(
        self,
        path: Path,
        formats: tuple[str, ...] = FLOAT_FORMATS,
        others: Mapping[str, str] = NO_OTHERS,
    ):
        """Reads the header; tensors are read one by one, when asked for.

        Args:
            path: of the file.
            formats: number formats that may occur, as safetensors names them.
            others: tensor name to one more format that it may have, such as flags.

        Raises:
            ValueError: if the header contradicts the file, names a tensor twice, or has
                another number format. OSError: no file.
        """
        require_regular(path)
        self.path = path
        try:
            # Checks the header against the file: no gap, overlap or surplus byte.
            safetensors.safe_open(path, "numpy")
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from error
        # Held open: another file may take the path before the tensors are read.
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        # The library takes the last of two tensors with one name.
        size = int.from_bytes(os.pread(self._file, 8, 0), "little")
        header = read_object(os.pread(self._file, size, 8), f"{path}: header")
        self.shapes, self.nbytes, self._places = {}, {}, {}
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items()):
            allowed = (*formats, others[name]) if name in others else formats
            if entry["dtype"] not in allowed:
                raise ValueError(
                    f"{path}: tensor {short(name)} has the number format "
                    f"{entry['dtype']}, expected one of {allowed}"
                )
            self.shapes[name] = tuple(entry["shape"])
            first, last = entry["data_offsets"]
            self.nbytes[name] = last - first
            self._places[name] = 8 + size + first, _DTYPES[entry["dtype"]]

    def get(self, name: str) -> Float32[np.ndarray, "..."]:
        """One tensor in float32, which represents the other float formats exactly."""
        return self.get_unconverted(name).astype(np.float32, copy=False)

    def get_compact(self, name: str) -> np.ndarray:
        """One tensor in bfloat16 if the file has it so, without a copy in float32."""
        found = self.get_unconverted(name)
        return found if found.dtype == BFLOAT16 else found.astype(np.float32)

    def get_unconverted(self, name: str) -> np.ndarray:
        """One tensor in the file's number format."""
        first, dtype = self._places[name]
        count = self.nbytes[name]
        # The library's own reader holds two copies more of a tensor at once.
        space = np.empty(count + _ALIGNMENT, np.uint8)
        start = -space.ctypes.data % _ALIGNMENT
        raw = space[start : start + count]
        done = 0
        # By places: threads and forks share the descriptor's own position. A call
        # reads at most 2 GiB.
        while done < count:
            found = os.preadv(self._file, [raw[done:].data], first + done)
            if not found:
                raise ValueError(f"{self.path} ended while {short(name)} was read")
            done += found
        return raw.view(dtype).reshape(self.shapes[name])


def read_object(raw: bytes, what: str) -> dict[str, Any]:
    """Parses a JSON object; ValueError if it is not one, or repeats a key."""

    def unique(pairs):
        result = dict(pairs)
        if len(result) < len(pairs):
            counts = collections.Counter(name for name, _ in pairs)
            twice = sorted(name for name, count in counts.items() if count > 1)
            raise ValueError(f"{listed(twice)} given twice")
        return result

    found = parse_json(raw, f"{what} is", pairs=unique)
    if not isinstance(found, dict):
        raise ValueError(f"{what} must be a JSON object, got {type(found).__name__}")
    return found
