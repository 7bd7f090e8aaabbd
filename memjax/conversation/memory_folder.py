"""The folder of a conversation's memory.

    memories/book/.lock           the process that writes
    memories/book/saved-000012/   the memory after the twelfth save

A save writes the next folder under a temporary name, syncs it to the disk, renames it,
and only then removes the one before. A crash at any moment leaves one complete memory.
"""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from memjax.buckets.bucket import as_path, is_bucket
from memjax.buckets.writing import unfinished_of
from memjax.models.checkpoints.memory_state import delete_memory
from memjax.training.locks.lock import LOCK_FILE, FolderLock

_SAVED = re.compile(r"saved-(\d{6,})")
# A save in progress, or the remains of one whose process was killed.
_UNFINISHED = unfinished_of(r"saved-\d{6,}")
Loaded = TypeVar("Loaded")

logger = logging.getLogger(__name__)


class MemoryFolder:
    """Folder with the saved memory of a conversation; created by the first save.

    Args:
        path: of the folder; it need not exist.

    Raises:
        ValueError: if it is a file, or a folder with other content.
    """

    def __init__(self, path: Path | str):
        if is_bucket(path):
            raise ValueError(
                f"memory must be a folder on a disk, got {str(as_path(path))!r}"
            )
        self.path = Path(path).expanduser()
        self._lock: FolderLock | None = None
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"memory must be a folder, got the file {self.path}")
        others = [name for name in self._names() if not _is_own(name)]
        if others and self.newest() is None:
            raise ValueError(
                f"memory must be a new folder or that of a memory; {self.path} holds "
                f"{sorted(others)[0]!r} and no memory"
            )

    def newest(self) -> Path | None:
        """Folder of the newest save; None without one."""
        number = self._newest_number()
        return None if number is None else self._saved(number)

    def load(self, read: Callable[[Path], Loaded]) -> Loaded | None:
        """Result of `read` for the newest save that it can read; None without one.

        If another process replaces the save meanwhile, the new one is read. A save that
        cannot be read is reported where an older one can, which a kill may have left.

        Raises:
            ValueError, OSError: of `read` for the newest save; none can be read.
        """
        while saves := self._numbers():
            try:
                return self._newest_readable(saves, read)
            except FileNotFoundError:
                if self._numbers() == saves:
                    raise
        return None

    def _newest_readable(
        self, saves: list[int], read: Callable[[Path], Loaded]
    ) -> Loaded:
        failure = None
        for number in saves:
            try:
                found = read(self._saved(number))
            except (ValueError, OSError) as error:
                failure = failure or error
                continue
            if failure is not None:
                logger.warning("%s is read instead: %s", self._saved(number), failure)
            return found
        assert failure is not None
        raise failure

    def lock(self) -> None:
        """Locks the folder for this process, until `close`.

        Raises:
            LockedError: naming the process that has locked it.
        """
        if self._lock is None:
            self._lock = FolderLock(self.path, "memory", "writes")

    def save(self, write: Callable[[Path], None]) -> None:
        """Saves a memory, and removes the save before it.

        Args:
            write: writes a folder at the path that it is given, atomically, as
                `save_memory` does.

        Raises:
            OSError: it could not be written; the memory before is untouched.
        """
        self.lock()
        number = self._newest_number()
        new = 1 if number is None else number + 1
        write(self._saved(new))
        for name in self._names():
            found = _SAVED.fullmatch(name)
            # A kill here leaves part of an old save, which is never the newest.
            if found and int(found[1]) < new:
                delete_memory(self.path / name)

    def remove(self) -> list[str]:
        """Removes the memory, and the folder if nothing else is in it.

        Returns:
            Names of other files and folders, which are left.

        Raises:
            LockedError: another process writes it.
        """
        self.lock()
        for name in self._names():
            if _SAVED.fullmatch(name) or _UNFINISHED.fullmatch(name):
                delete_memory(self.path / name)
        self.close()
        (self.path / LOCK_FILE).unlink(missing_ok=True)
        left = sorted(self._names())
        # A link to the folder is left.
        if not left and not self.path.is_symlink():
            self.path.rmdir()
        return left

    def close(self) -> None:
        """Unlocks the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> "MemoryFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _names(self) -> list[str]:
        return [p.name for p in self.path.iterdir()] if self.path.is_dir() else []

    def _saved(self, number: int) -> Path:
        return self.path / f"saved-{number:06}"

    def _newest_number(self) -> int | None:
        return next(iter(self._numbers()), None)

    def _numbers(self) -> list[int]:
        """Of all saves, the newest first."""
        found = (_SAVED.fullmatch(name) for name in self._names())
        return sorted((int(match[1]) for match in found if match), reverse=True)


def _is_own(name: str) -> bool:
    """Whether a file or folder is one that this module writes."""
    if name == LOCK_FILE:
        return True
    return bool(_SAVED.fullmatch(name) or _UNFINISHED.fullmatch(name))
