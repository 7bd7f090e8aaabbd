"""JSON lines, compressed as .xz or not: objects whose fields are text."""

import json
import lzma
from pathlib import Path
from typing import Any, NamedTuple


class Record(NamedTuple):
    """An object, and where it stands, for messages.

    Attributes:
        place: file and line.
        fields: as the line has them.
    """

    place: str
    fields: dict[str, Any]

    def text(self, name: str) -> str:
        """A field that must be there and say something."""
        value = self.fields.get(name)
        if not isinstance(value, str) or not value.strip():
            raise ValueError(
                f"{self.place}: {name!r} must be a string with something in it, "
                f"got {value!r}"
            )
        return value

    def optional_text(self, name: str) -> str:
        """A field that may be absent, which is ""."""
        value = self.fields.get(name, "")
        if not isinstance(value, str):
            raise ValueError(f"{self.place}: {name!r} must be a string, got {value!r}")
        return value


def read_records(path: Path, what: str) -> list[Record]:
    """Reads every line that is not empty.

    Args:
        path: the file; .xz is decompressed.
        what: a line holds, for messages.

    Raises:
        ValueError: if the file cannot be read or holds no line, or naming the line
            that is not an object.
    """
    try:
        data = path.read_bytes()
        text = (lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8")
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ValueError(f"path={str(path)!r} cannot be read: {error}") from error
    records = [
        _record(line, f"{path}, line {i}")
        for i, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]
    if not records:
        raise ValueError(f"path={str(path)!r} holds no {what}")
    return records


def _record(line: str, place: str) -> Record:
    try:
        fields = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{place} must be an object, got {type(fields).__name__}")
    return Record(place, fields)
