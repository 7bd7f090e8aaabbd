"""Folders in buckets, `gs://` and `s3://`, and on a disk.

`as_path` makes a path of either; a `Bucket` lists objects with their checksums, and
copies folders up and down. Credentials come from the environment, as gcsfs and s3fs
find them.

A bucket has no renames, locks or appends. A folder is therefore made complete by its
last object, which appears at once with all of its content.
"""

import errno
import re
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from memjax.buckets.remote_path import RemotePath
from memjax.buckets.store import Moved, Store
from memjax.checks import short
from memjax.config_io import AnyPath

SCHEMES = ("gs", "s3")
# A `pathlib.Path` of a URL has lost one of the slashes.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{1,2}(.*)")
#: Keys of a store's checksum: CRC32C of Google, the ETag of S3.
_CHECKSUMS = ("crc32c", "ETag", "etag")


class Entry(NamedTuple):
    """An object: its bytes, and the checksum of the store."""

    size: int
    checksum: str


def as_path(path: AnyPath | str) -> AnyPath:
    """A folder or file on a disk, or in a bucket if `path` is a URL.

    Args:
        path: on a disk; or "gs://BUCKET/NAME" or "s3://BUCKET/NAME", also as a
            `pathlib.Path`, which drops one slash.

    Returns:
        A path whose `/`, `parent`, `exists`, `is_file`, `open` and `read_text` work in
        either place. `is_bucket` tells which.

    Raises:
        ValueError: a URL of another scheme, without a bucket, or with a part like "..".
    """
    if not isinstance(path, str | PathLike):
        raise ValueError(f"path must be a str or a Path, got {short(path)}")
    found = _URL.fullmatch(str(path))
    if found is None:
        return Path(path).expanduser()
    scheme, rest = found[1], found[2].rstrip("/")
    if scheme not in SCHEMES:
        raise ValueError(
            f"{short(str(path))} must be a path or a URL of "
            f"{' or '.join(f'{name}://' for name in SCHEMES)}"
        )
    # Some programs resolve these, others do not: two folders would have one name.
    if not rest or {"", ".", ".."} & set(rest.split("/")):
        raise ValueError(
            f"{short(str(path))} must be {scheme}://BUCKET/NAME, without empty parts "
            "and . or .."
        )
    Store(scheme)
    return RemotePath(f"{scheme}://{rest}")


def on_disk(folder: Any) -> Path:
    """The path of a folder; ValueError for a URL, and for what is no path."""
    # Nothing is asked of the store: without credentials its answer takes long.
    if not isinstance(folder, str | Path) or is_bucket(folder):
        raise ValueError(f"folder must be on a disk, got {short(folder)}")
    return Path(as_path(folder))


def is_bucket(path: AnyPath | str) -> bool:
    """Whether a path of `as_path`, or a text, is in a bucket."""
    found = _URL.fullmatch(str(path))
    return found is not None and found[1] in SCHEMES


class Bucket:
    """The objects below one URL. Names are relative to it.

    Args:
        url: of a folder, which need not exist.

    Raises:
        ValueError: as `as_path`; or the scheme's package is not installed.
        OSError: from all methods, of one line with the store's answer, after minutes
            without one.
    """

    def __init__(self, url: AnyPath | str):
        self.url = str(as_path(url))
        scheme, self._root = self.url.split("://")
        self._store = Store(scheme)

    def entries(self, below: str = "") -> dict[str, Entry]:
        """Size and checksum of all objects whose names begin with `below`/."""
        start = f"{self._root}/{below}".rstrip("/")
        found = self._call("list", below, "find", start, detail=True)
        return {
            name.removeprefix(f"{self._root}/"): Entry(
                int(entry["size"]), _checksum(entry)
            )
            for name, entry in sorted(found.items())
            if name.startswith(f"{start}/")
        }

    def read(self, name: str) -> bytes:
        """The content of an object; raises FileNotFoundError without one."""
        return self._call("read", name, "cat_file", self._path(name))

    def write(self, name: str, content: bytes, *, new: bool = False) -> None:
        """Writes an object; with `new` raises FileExistsError if there is one."""
        mode = "create" if new else "overwrite"
        self._call("write", name, "pipe_file", self._path(name), content, mode=mode)

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects; a missing one is no error."""
        for name in names:
            try:
                self._call("delete", name, "rm_file", self._path(name))
            except FileNotFoundError:
                continue

    def move(self, name: str, to: str) -> None:
        """Copies an object and deletes the original: a kill may leave both."""
        self._call("copy", name, "cp_file", self._path(name), self._path(to))
        self.delete([name])

    def upload(self, folder: Path, names: Iterable[str], below: str = "") -> None:
        """Copies files of a folder into the bucket."""
        for name in names:
            to = f"{below}/{name}" if below else name
            source = str(folder / name)
            place = self._path(to)
            self._call("write", to, "put_file", source, place, callback=Moved())

    def download(self, names: Iterable[str], folder: Path, below: str = "") -> None:
        """Copies objects into a folder; names that leave it are refused."""
        for name in names:
            local = name.removeprefix(f"{below}/") if below else name
            plain = PurePosixPath(local)
            if plain.is_absolute() or ".." in plain.parts:
                raise OSError(errno.EINVAL, f"{self.url} has an object {short(name)}")
            (folder / local).parent.mkdir(parents=True, exist_ok=True)
            source, to = self._path(name), str(folder / local)
            self._call("read", name, "get_file", source, to, callback=Moved())

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _call(self, verb: str, name: str, method: str, *args: Any, **more: Any) -> Any:
        return self._store.call(verb, f"{self.url}/{name}", method, *args, **more)


def _checksum(entry: Mapping[str, Any]) -> str:
    return str(next((entry[key] for key in _CHECKSUMS if entry.get(key)), ""))
