"""Paths in a bucket whose reads are `Store` calls, with their errors and waits."""

import io
from collections.abc import Iterator
from typing import Any

from etils import epath

from memjax.buckets.store import Store

#: Bytes of one request of a file that is read in parts.
PART = 2**22


class RemotePath(type(epath.Path("gs://bucket/name"))):
    """A path of `epath` in a bucket.

    Raises:
        OSError: from all methods that read, as `Store.call`.
    """

    def exists(self) -> bool:
        """True for an object, and for a folder of objects."""
        return self._kind() is not None

    def is_file(self) -> bool:
        """True for an object."""
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """True for a folder of objects."""
        return self._kind() == "directory"

    def iterdir(self) -> Iterator["RemotePath"]:
        """The objects and folders directly below."""
        for name in self.call("ls", detail=False):
            yield self / str(name).rstrip("/").rpartition("/")[2]

    def open(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, mode: str = "r", **options: Any
    ) -> Any:
        """As `epath`; "rb" reads in parts, as asked for."""
        if mode == "rb":
            return io.BufferedReader(_Content(self), PART)
        return super().open(mode, **options)

    def call(self, method: str, **options: Any) -> Any:
        """Calls the store with this path."""
        url = str(self)
        scheme, _, name = url.partition("://")
        return Store(scheme).call("read", url, method, name, **options)

    def _kind(self) -> str | None:
        try:
            return self.call("info")["type"]
        except FileNotFoundError:
            return None


class _Content(io.RawIOBase):
    """The bytes of an object."""

    def __init__(self, path: RemotePath):
        self._path, self._at = path, 0
        self._size = int(path.call("info")["size"] or 0)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}
        self._at = start[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        found = self._path.call("cat_file", start=self._at, end=end)
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)

    def readall(self) -> bytes:
        content = bytearray(max(0, self._size - self._at))
        view, filled = memoryview(content), 0
        while read := self.readinto(view[filled:]):
            filled += read
        return bytes(content[:filled])
