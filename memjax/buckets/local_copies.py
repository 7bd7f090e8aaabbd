"""Local copies of files from a bucket, and of files to upload."""

import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from memjax.buckets.bucket import Bucket
from memjax.config_io import AnyPath


class WorkingCopy:
    """A local folder with the small files of a bucket, for writing and appending.

    Files of sub-folders are uploaded, but not downloaded.

    Args:
        url: of the folder in the bucket.
        folder: on a disk, empty.
        skip: parts of names that are not copied.
    """

    def __init__(self, url: AnyPath | str, folder: Path, skip: Iterable[str]):
        self._bucket, self._folder, self._skip = Bucket(url), folder, frozenset(skip)
        names = self._of_interest(self._bucket.entries())
        # Sub-folders have traces of gigabytes, and are only added to.
        self._bucket.download([name for name in names if "/" not in name], folder)
        self._pushed = self._states()

    def push(self) -> None:
        """Copies files that have changed since the last time into the bucket."""
        states = self._states()
        changed = [n for n, state in states.items() if self._pushed.get(n) != state]
        self._bucket.upload(self._folder, changed)
        # Files that grew meanwhile are copied again the next time.
        self._pushed = states

    def _states(self) -> dict[str, tuple[int, int]]:
        paths = (path for path in self._folder.rglob("*") if path.is_file())
        names = {path.relative_to(self._folder).as_posix(): path for path in paths}
        kept = self._of_interest(names)
        return {n: (names[n].stat().st_size, names[n].stat().st_mtime_ns) for n in kept}

    def _of_interest(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if not self._skip & set(name.split("/"))]


@contextmanager
def written_here(path: AnyPath) -> Iterator[Path]:
    """A local path for a folder, which is copied into a bucket at the end.

    On a disk it is the path itself. After an exception it is not copied.

    Raises:
        OSError: the bucket refuses it.
    """
    if isinstance(path, Path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="memjax-") as temporary:
        here = Path(temporary) / path.name
        yield here
        put(here, path)


def put(here: Path, path: AnyPath, last: str = "") -> None:
    """Copies a local folder into a bucket.

    Args:
        here: the folder.
        path: its URL.
        last: the file of the folder that is copied after all others.
    """
    files = (file for file in sorted(here.rglob("*")) if file.is_file())
    names = [file.relative_to(here).as_posix() for file in files]
    Bucket(path).upload(here, sorted(names, key=lambda name: name == last))


def cached_files(url: AnyPath | str, names: Iterable[str], cache: Path) -> Path:
    """A folder with cached copies of objects.

    Args:
        url: of their folder.
        names: of objects; missing ones are left out.
        cache: folder of the cache, with a folder for every content by the store's
            checksums. Processes may share it.

    Raises:
        OSError: the bucket refuses, or the disk is full.
    """
    bucket = Bucket(url)
    entries = bucket.entries()
    found = sorted((name, entries[name]) for name in set(names) & set(entries))
    version = hashlib.sha256(repr((bucket.url, found)).encode()).hexdigest()[:24]
    folder = cache / "buckets" / version
    for name, _ in found:
        if not (folder / name).exists():
            partial = folder / f".{uuid.uuid4().hex}"
            try:
                bucket.download([name], partial)
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(partial / name, folder / name)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder
