"""Configurations to JSON and back, without executing code.

A field whose type is a Protocol has a function in its metadata that returns the
dataclasses it may hold, `field(metadata={TYPES: function})`. Each is written with its
class name as "type" and read back from that list alone: a file can name no other class.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from memjax.checks import require_known, short

#: A file or a folder, on a disk or in a bucket; `memjax.buckets` makes them.
AnyPath = Path | epath.Path
#: Key of a field's metadata: a function that returns the classes the field may hold.
TYPES = "types"


#: Bytes of a JSON file; a record of a configuration has thousands.
MAX_JSON = 2**28


def parse_json(
    text: str | bytes, where: str, *, pairs: Callable[[list], Any] | None = None
) -> Any:
    """The values of a JSON text; `where` begins the message of an error.

    All JSON from outside is parsed here.

    Args:
        text: JSON, in UTF-8 where it is bytes.
        where: file, and line where it has several.
        pairs: makes something else of objects, as `object_pairs_hook` of `json.loads`.

    Raises:
        ValueError: malformed, not UTF-8, or nested too deeply for Python's parser.
    """
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        return json.loads(text, object_pairs_hook=pairs)
    # The parser calls itself for each level, and gives up at a thousand or more.
    except RecursionError as error:
        raise ValueError(f"{where} not JSON (nested too deeply)") from error
    except ValueError as error:
        raise ValueError(f"{where} not JSON ({short(error)})") from error


def read_json(file: AnyPath) -> Any:
    """The values of a JSON file.

    Raises:
        ValueError: as `read_bounded` and `parse_json`.
        OSError: the file cannot be read.
    """
    return parse_json(read_bounded(file), f"{file} is")


def read_bounded(file: AnyPath) -> bytes:
    """The bytes of a JSON file from outside.

    Raises:
        ValueError: no regular file, or one of more than `MAX_JSON` bytes.
        OSError: the file cannot be read.
    """
    require_regular(file)
    with file.open("rb") as stream:
        content = stream.read(MAX_JSON + 1)
    if len(content) > MAX_JSON:
        raise ValueError(f"{file} has more than {MAX_JSON:,} bytes")
    return content


def require_regular(file: AnyPath) -> None:
    """Raises ValueError for what exists and is no regular file, or a link to one."""
    # Reading a pipe may never return, and a device has no end.
    if file.exists() and not file.is_file():
        raise ValueError(f"{file} is not a regular file")


def to_record(config: Any) -> dict[str, Any]:
    """A frozen dataclass as JSON-able values; paths become strings."""

    return {
        field.name: _plain(getattr(config, field.name), TYPES in field.metadata)
        for field in dataclasses.fields(config)
        if field.init
    }


def from_record(kind: type, record: Any, where: str = "config") -> Any:
    """Builds the dataclass `kind` from a record of `to_record`.

    Raises:
        ValueError: naming the field, if one is unknown, missing or of another type.
    """
    if not isinstance(record, dict):
        raise ValueError(f"{where} must be an object, got {short(record)}")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    # An unknown field is an error: a setting that nothing reads would go unnoticed.
    for name in record:
        if name not in fields:
            raise ValueError(f"{where}.{name} is not a field of {kind.__name__}")
    for field in fields.values():
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and field.name not in record:
            raise ValueError(f"{where}.{field.name} is missing")
    allowed = {f.name: f.metadata.get(TYPES, tuple)() for f in fields.values()}
    values = {
        name: _convert(hints[name], value, f"{where}.{name}", allowed[name])
        for name, value in record.items()
    }
    try:
        return kind(**values)
    # Of the class's own checks, which know no file.
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def completed(kind: type, record: Any, where: str = "checkpoint") -> dict[str, Any]:
    """A record of the dataclass `kind`, with defaults for the fields that it lacks.

    Raises:
        ValueError: as `from_record`.
    """
    return to_record(from_record(kind, record, where))


def _plain(value: Any, typed: bool) -> Any:
    """A value as JSON has it; a dataclass with its class name where `typed`."""
    if dataclasses.is_dataclass(value):
        name = {"type": type(value).__name__} if typed else {}
        return name | to_record(value)
    if isinstance(value, dict):
        return {key: _plain(item, typed) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item, typed) for item in value]
    return str(value) if isinstance(value, Path) else value


def _from_typed(allowed: Sequence[type], value: Any, where: str) -> Any:
    """The dataclass that the record names, one of those allowed."""
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise ValueError(f"{where} must be an object with a type, got {short(value)}")
    kinds = {kind.__name__: kind for kind in allowed}
    require_known(f"{where}.type", value["type"], tuple(kinds))
    # Only classes of the field's own list can be named, whatever the file says.
    rest = {name: item for name, item in value.items() if name != "type"}
    return from_record(kinds[value["type"]], rest, where)


def _kind_of(value: Any, kinds: list[Any]) -> Any:
    """The first dataclass that has all of the record's fields."""
    if not isinstance(value, dict):
        return kinds[0]

    def has_all(kind):
        return {*value} <= {
            f.name
            for f in (
                dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
            )
        }

    return next(filter(has_all, kinds), kinds[0])


def _convert(hint: Any, value: Any, where: str, allowed: Sequence[type] = ()) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if allowed and getattr(hint, "_is_protocol", False):
        return _from_typed(allowed, value, where)
    if dataclasses.is_dataclass(hint):
        return from_record(typing.cast(type, hint), value, where)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        # A union of dataclasses is resolved by the record's fields.
        kinds = [arg for arg in args if arg is not type(None)]
        return _convert(_kind_of(value, kinds), value, where, allowed)
    if origin is tuple and isinstance(value, list):
        items = args[:1] * len(value) if args[-1] is Ellipsis else args
        if len(items) != len(value):
            raise ValueError(
                f"{where} must have {len(items)} items, got {short(value)}"
            )
        return tuple(
            _convert(item, part, f"{where}[{i}]" if allowed else where, allowed)
            for i, (item, part) in enumerate(zip(items, value, strict=True))
        )
    if origin is typing.Literal and value in args:
        return value
    if hint is Path and isinstance(value, str):
        return Path(value)
    # Other programs write 1.0 as 1 in JSON.
    if hint is float and type(value) in (int, float):
        try:
            return float(value)
        except OverflowError as error:
            raise ValueError(f"{where} is too large, got {short(value)}") from error
    if type(value) is hint:
        return value
    raise ValueError(f"{where} must be {hint}, got {short(value)}")
