"""JSON lines of objects with text fields, compressed as .xz or not."""

import lzma
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from memjax.checks import short
from memjax.config_io import parse_json

#: Bytes of a file, decompressed: half a megabyte of .xz may hold gigabytes.
MAX_FILE = 2**28


class Record(NamedTuple):
    """An object and its place, for messages.

    Attributes:
        place: file and line.
        fields: of the object.
    """

    place: str
    fields: dict[str, Any]

    def text(self, name: str) -> str:
        """A required field that is not blank."""
        value = self.fields.get(name)
        if not isinstance(value, str) or not value.strip():
            raise ValueError(
                f"{self.place}: {name!r} must be a string with something in it, "
                f"got {short(value)}"
            )
        return value

    def optional_text(self, name: str) -> str:
        """An optional field; "" if absent."""
        value = self.fields.get(name, "")
        if not isinstance(value, str):
            raise ValueError(
                f"{self.place}: {name!r} must be a string, got {short(value)}"
            )
        return value


def read_records(path: Path, what: str) -> list[Record]:
    """Reads every line that is not empty.

    Args:
        path: the file; .xz is decompressed.
        what: content of a line, for messages.

    Raises:
        ValueError: if the file cannot be read, holds no line or more than `MAX_FILE`
            bytes, or naming the line that is not an object.
    """
    # One in a bucket is no `Path`.
    if not isinstance(path, PurePath):
        raise ValueError(f"path must be a Path, got {short(path)}")
    if path.exists() and not path.is_file():
        raise ValueError(f"path={str(path)!r} is not a regular file")
    try:
        opened = lzma.open if path.suffix == ".xz" else open
        with opened(path, "rb") as stream:
            data = stream.read(MAX_FILE + 1)
        text = data.decode("utf-8")
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ValueError(f"path={str(path)!r} cannot be read: {error}") from error
    if len(data) > MAX_FILE:
        raise ValueError(f"path={str(path)!r} holds more than {MAX_FILE:,} bytes")
    records = [
        _record(line, f"{path}, line {i}")
        for i, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]
    if not records:
        raise ValueError(f"path={str(path)!r} holds no {what}")
    return records


def _record(line: str, place: str) -> Record:
    fields = parse_json(line, f"{place} is")
    if not isinstance(fields, dict):
        raise ValueError(f"{place} must be an object, got {type(fields).__name__}")
    return Record(place, fields)
