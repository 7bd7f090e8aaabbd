"""GGUF files of one part or several, as in `name-00001-of-00003.gguf`.

The first part has the metadata of the model. All have `split.no`, counted from 0,
`split.count` and `split.tensors.count`, the number of tensors in all parts.
"""

import re
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from memjax.models.checkpoints.gguf.file import GGUFFile, TensorRecord

PART = re.compile(r"(.+-)(\d{5})(-of-)(\d{5})(\.gguf)")


def part_names(name: str) -> list[str]:
    """The names of all parts that a part's name tells of; else the name alone."""
    parts = PART.fullmatch(name)
    if not parts or not 1 <= int(parts[2]) <= int(parts[4]):
        return [name]
    before, _, of, count, suffix = parts.groups()
    return [f"{before}{i + 1:05}{of}{count}{suffix}" for i in range(int(count))]


class GGUFParts:
    """Metadata and tensors of a GGUF file and its further parts; see `GGUFFile`."""

    def __init__(self, path: Path):
        """Reads the headers of all parts, whichever of them `path` is.

        Raises:
            ValueError: naming the part that is missing or of another file, or as
                `GGUFFile`.
        """
        self.path = path
        parts = [path.with_name(name) for name in part_names(path.name)]
        for part in parts:
            if not part.is_file():
                raise ValueError(f"{part} is missing, a part of {path}")
        files = list(map(GGUFFile, parts))
        for i, file in enumerate(files):
            _require_part(file, i, len(files))
        self.metadata = files[0].metadata
        self.records: dict[str, TensorRecord] = {}
        self._file_of: dict[str, GGUFFile] = {}
        for file in files:
            for name in file.records.keys() & self.records.keys():
                raise ValueError(f"{file.path}: tensor {name!r} is in two parts")
            self.records |= file.records
            self._file_of |= dict.fromkeys(file.records, file)
        claimed = self.metadata.get("split.tensors.count", len(self.records))
        if len(files) > 1 and claimed != len(self.records):
            raise ValueError(
                f"{path}: split.tensors.count is {claimed}, the parts have "
                f"{len(self.records)} tensors"
            )

    def is_precise(self, name: str) -> bool:
        """Whether a tensor is more precise than bfloat16; quantized ones are not."""
        return self._file_of[name].is_precise(name)

    def read(self, name: str, expert: int | None = None) -> Float32[np.ndarray, "..."]:
        """A tensor in float32, dequantized; one matrix of those of all experts."""
        return self._file_of[name].read(name, expert)


def _require_part(file: GGUFFile, index: int, count: int) -> None:
    """Raises ValueError for a file that says it is another part, by its metadata."""
    found = file.metadata.get("split.no", 0), file.metadata.get("split.count", 1)
    # Whole files may have a count of 0.
    if found != (index, count) and (count > 1 or found not in ((0, 0), (0, 1))):
        raise ValueError(
            f"{file.path} is part {found[0]} of {found[1]} by its split.no and "
            f"split.count, and part {index} of {count} by its name"
        )
