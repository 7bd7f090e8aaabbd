"""A folder with the newest whole memory of a conversation.

    memories/book/.lock           who writes here
    memories/book/saved-000012/   the memory after the twelfth save

A save writes the next folder under another name, puts it on the disk, renames it, and
only then removes the one before. Whatever ends a process, one whole memory is left.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from memjax.buckets.bucket import is_bucket
from memjax.training.locks.lock import LOCK_FILE, FolderLock

_SAVED = re.compile(r"saved-(\d{6,})")
# What is being written, or what a process that was killed left of it.
_UNFINISHED = re.compile(r"\.saved-\d{6,}\.\d+")
Loaded = TypeVar("Loaded")


class MemoryFolder:
    """Where a memory lies. Looking changes nothing on the disk.

    Args:
        path: of the folder; it need not exist.

    Raises:
        ValueError: if it is a file, or a folder of something else.
    """

    def __init__(self, path: Path | str):
        if is_bucket(path):
            raise ValueError(f"memory must be a folder on a disk, got {str(path)!r}")
        self.path = Path(path).expanduser()
        self._lock: FolderLock | None = None
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"memory must be a folder, got the file {self.path}")
        known = lambda name: _SAVED.fullmatch(name) or _UNFINISHED.fullmatch(name)
        others = [n for n in self._names() if n != LOCK_FILE and not known(n)]
        if others and self.newest() is None:
            raise ValueError(
                f"memory must be a new folder or that of a memory; {self.path} holds "
                f"{sorted(others)[0]!r} and no memory"
            )

    def newest(self) -> Path | None:
        """The newest whole memory; None if nothing was saved yet."""
        number = self._newest_number()
        return None if number is None else self._saved(number)

    def load(self, read: Callable[[Path], Loaded]) -> Loaded | None:
        """What `read` makes of the newest memory; None if there is none.

        Another process may save meanwhile, and remove what is being read: then the
        one after it is read.
        """
        while (folder := self.newest()) is not None:
            try:
                return read(folder)
            except FileNotFoundError:
                if self.newest() == folder:
                    raise
        return None

    def lock(self) -> None:
        """Keeps other processes from writing here, until `close`.

        Raises:
            LockedError: naming the process that writes here.
        """
        if self._lock is None:
            self._lock = FolderLock(self.path, "memory", "writes")

    def save(self, write: Callable[[Path], None]) -> None:
        """Makes what `write` puts into a new folder the newest memory.

        Args:
            write: given a path, makes a folder there that is whole or not there at
                all, as `save_memory` does.

        Raises:
            OSError: it could not be written; the memory before is untouched.
        """
        self.lock()
        number = self._newest_number()
        new = 1 if number is None else number + 1
        write(self._saved(new))
        for name in self._names():
            found = _SAVED.fullmatch(name)
            # A kill in the middle of this leaves a part of an old one: never newest.
            if found and int(found[1]) < new:
                shutil.rmtree(self.path / name)

    def close(self) -> None:
        """Lets other processes write here."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> "MemoryFolder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _names(self) -> list[str]:
        return [p.name for p in self.path.iterdir()] if self.path.is_dir() else []

    def _saved(self, number: int) -> Path:
        return self.path / f"saved-{number:06}"

    def _newest_number(self) -> int | None:
        found = (_SAVED.fullmatch(name) for name in self._names())
        return max((int(match[1]) for match in found if match), default=None)
