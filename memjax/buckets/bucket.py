"""Folders in buckets, `gs://` and `s3://`, and on a disk.

`as_path` makes a path of either; a `Bucket` lists objects with their checksums, and
copies folders up and down. Credentials come from the environment, as gcsfs and s3fs
find them.

A bucket has no renames, locks or appends. A folder is therefore made complete by its
last object, which appears at once with all of its content.
"""

import errno
import re
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from etils import epath

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
    _filesystem(scheme)
    return epath.Path(f"{scheme}://{rest}")


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
        OSError: from all methods, of one line with the store's answer.
    """

    def __init__(self, url: AnyPath | str):
        self.url = str(as_path(url))
        scheme, self._root = self.url.split("://")
        self._files = _filesystem(scheme)

    def entries(self, below: str = "") -> dict[str, Entry]:
        """Size and checksum of all objects whose names begin with `below`/."""
        start = f"{self._root}/{below}".rstrip("/")
        found = self._call("list", below, self._files.find, start, detail=True)
        return {
            name.removeprefix(f"{self._root}/"): Entry(
                int(entry["size"]), _checksum(entry)
            )
            for name, entry in sorted(found.items())
            if name.startswith(f"{start}/")
        }

    def read(self, name: str) -> bytes:
        """The content of an object; raises FileNotFoundError without one."""
        return self._call("read", name, self._files.cat_file, self._path(name))

    def write(self, name: str, content: bytes, *, new: bool = False) -> None:
        """Writes an object; with `new` raises FileExistsError if there is one."""
        mode = "create" if new else "overwrite"
        write = self._files.pipe_file
        self._call("write", name, write, self._path(name), content, mode=mode)

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects; a missing one is no error."""
        for name in names:
            try:
                self._call("delete", name, self._files.rm_file, self._path(name))
            except FileNotFoundError:
                continue

    def move(self, name: str, to: str) -> None:
        """Copies an object and deletes the original: a kill may leave both."""
        copy = self._files.cp_file
        self._call("copy", name, copy, self._path(name), self._path(to))
        self.delete([name])

    def upload(self, folder: Path, names: Iterable[str], below: str = "") -> None:
        """Copies files of a folder into the bucket."""
        for name in names:
            to = f"{below}/{name}" if below else name
            source = str(folder / name)
            self._call("write", to, self._files.put_file, source, self._path(to))

    def download(self, names: Iterable[str], folder: Path, below: str = "") -> None:
        """Copies objects into a folder; names that leave it are refused."""
        for name in names:
            local = name.removeprefix(f"{below}/") if below else name
            plain = PurePosixPath(local)
            if plain.is_absolute() or ".." in plain.parts:
                raise OSError(errno.EINVAL, f"{self.url} has an object {short(name)}")
            (folder / local).parent.mkdir(parents=True, exist_ok=True)
            get = self._files.get_file
            self._call("read", name, get, self._path(name), str(folder / local))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _call(
        self, verb: str, name: str, method: Callable[..., Any], *args: Any, **more: Any
    ) -> Any:
        """Calls the store; errors become an OSError of one line."""
        try:
            return method(*args, **more)
        except (FileNotFoundError, FileExistsError) as error:
            # The message for a missing bucket and a missing object is the same.
            raise type(error)(error.errno, self._message(verb, name, error)) from None
        except Exception as error:
            code = error.errno if isinstance(error, OSError) else None
            text = self._message(verb, name, error)
            raise OSError(code or errno.EIO, text) from error

    def _message(self, verb: str, name: str, error: Exception) -> str:
        said = " ".join(str(error).split()) or type(error).__name__
        return f"cannot {verb} {self.url}/{name}: {short(said)}"


def _filesystem(scheme: str) -> Any:
    # A cached listing would hide what other processes write.
    try:
        if scheme == "gs":
            import gcsfs

            return gcsfs.GCSFileSystem(use_listings_cache=False)
        import s3fs

        return s3fs.S3FileSystem(use_listings_cache=False)
    except ImportError as error:
        raise ValueError(
            f"{scheme}:// needs the package {error.name}: pip install {error.name}"
        ) from error


def _checksum(entry: Mapping[str, Any]) -> str:
    return str(next((entry[key] for key in _CHECKSUMS if entry.get(key)), ""))
