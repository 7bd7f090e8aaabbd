"""Character vectors out of an R lazy-load database (.rdx and .rdb), without R.

Reads the part of R's XDR serialisation that data packages use; evaluates nothing.
(R Internals, sections 1.8 and 3.)
"""

import bz2
import lzma
import struct
import zlib
from pathlib import Path
from typing import Any

_SYMBOL, _PAIRLIST, _CHARACTER, _LOGICAL, _INTEGER, _REAL = 1, 2, 9, 10, 13, 14
_STRINGS, _LIST, _EXPRESSIONS, _REFERENCE, _NULL = 16, 19, 20, 255, 254
# Global, base and empty environments, and the two kinds of missing value.
_CONSTANTS = (242, 241, 251, 252, 253)
_ZLIB_OR_GZIP = zlib.MAX_WBITS | 32


def read_lazy_load(base: Path) -> dict[str, Any]:
    """Returns the variables of `base`.rdx and `base`.rdb: lists and dicts.

    Raises:
      ValueError: a truncated file, or a type outside the part that is read.
    """
    try:
        packed = base.with_suffix(".rdx").read_bytes()
        index = _unserialise(zlib.decompress(packed, _ZLIB_OR_GZIP))
        database = base.with_suffix(".rdb").read_bytes()
        return {
            name: _unserialise(_decompress(database[start : start + length]))
            for name, (start, length) in index["variables"].items()
        }
    except (struct.error, zlib.error, lzma.LZMAError, KeyError, TypeError) as error:
        raise ValueError(f"{base}: not a readable R database ({error})") from error


def _decompress(record: bytes) -> bytes:
    """Undoes one record: big-endian length, perhaps a letter, then the data."""
    (length,) = struct.unpack_from(">I", record)
    match record[4:5]:
        case b"Z":
            filters = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
            content = lzma.decompress(record[5:], lzma.FORMAT_RAW, filters=filters)
        case b"2":
            content = bz2.decompress(record[5:])
        case b"0":
            content = record[5:]
        case _:
            content = zlib.decompress(record[4:])
    if len(content) != length:
        raise ValueError(f"R record of {len(content)} bytes should have {length}")
    return content


def _unserialise(content: bytes) -> Any:
    if content[:2] != b"X\n":
        raise ValueError(f"not R's XDR format: starts with {content[:2]!r}")
    reader = _Reader(content)
    version = reader.integer()
    reader.position += 8  # the R versions that wrote it and that can read it
    if version == 3:
        encoding_length = reader.integer()
        reader.position += encoding_length
    return reader.item()


class _Reader:
    def __init__(self, content: bytes):
        self._content = content
        self.position = 2
        self._references: list[Any] = []

    def integer(self) -> int:
        (value,) = struct.unpack_from(">i", self._content, self.position)
        self.position += 4
        return value

    def item(self) -> Any:
        flags = self.integer()
        kind, has_attributes = flags & 255, bool(flags & 0x200)
        if kind == _NULL or kind in _CONSTANTS:
            return None
        if kind == _REFERENCE:
            return self._references[(flags >> 8 or self.integer()) - 1]
        if kind == _SYMBOL:
            self._references.append(self.item())
            return self._references[-1]
        if kind == _CHARACTER:
            return self._string("latin-1" if flags >> 14 & 1 else "utf-8")
        if kind == _PAIRLIST:
            return self._pairlist(flags)
        value = self._vector(kind)
        attributes = dict(self.item()) if has_attributes else {}
        names = attributes.get("names")
        return dict(zip(names, value, strict=True)) if names else value

    def _string(self, encoding: str) -> str | None:
        length = self.integer()
        if length == -1:
            return None
        self.position += length
        return self._content[self.position - length : self.position].decode(encoding)

    def _pairlist(self, flags: int) -> list[tuple[Any, Any]]:
        pairs = []
        while flags & 255 == _PAIRLIST:
            if flags & 0x200:
                self.item()
            tag = self.item() if flags & 0x400 else None
            pairs.append((tag, self.item()))
            flags = self.integer()
        return pairs

    def _vector(self, kind: int) -> list[Any]:
        if kind not in (_STRINGS, _LIST, _EXPRESSIONS, _LOGICAL, _INTEGER, _REAL):
            raise ValueError(f"R type {kind} is not one that a text package needs")
        length = self.integer()
        if kind in (_STRINGS, _LIST, _EXPRESSIONS):
            return [self.item() for _ in range(length)]
        form = f">{length}{'d' if kind == _REAL else 'i'}"
        values = struct.unpack_from(form, self._content, self.position)
        self.position += struct.calcsize(form)
        return list(values)
