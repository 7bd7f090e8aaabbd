"""Checkpoints on a disk, by atomic renames and file locks."""

import errno
import fcntl
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from memjax.buckets.writing import open_regular, sync_folder, write_atomically
from memjax.checks import short
from memjax.config_io import read_json
from memjax.training.checkpoints.checksums import problems, write_digests
from memjax.training.checkpoints.folder import (
    FORMAT,
    FORMAT_FILE,
    NEEDED,
    DiskFullError,
    Folder,
    SaveError,
)

UNFINISHED = ".orbax-checkpoint-tmp"
DELETED = ".deleted"

logger = logging.getLogger(__name__)


class DiskFolder(Folder):
    """A folder on a local or shared filesystem; see `Folder`."""

    def __init__(self, path: Path):
        self._disk = path.absolute()
        super().__init__(self._disk)
        self._lock: Any = None
        self._require_ours()

    def steps(self) -> list[int]:
        """The steps that have a folder, oldest first; damaged ones included."""
        if not self._disk.is_dir():
            return []
        names = (p.name for p in self._disk.iterdir() if p.is_dir())
        return sorted(int(name) for name in names if name.isdecimal())

    def place(self, step: int) -> Path:
        """The folder of a step."""
        return self._disk / str(step)

    def bring(self, step: int) -> None:
        """No-op: a local checkpoint is already in place."""

    def seal(self, step: int) -> None:
        """Writes the digests before the folder gets its final name."""
        folder = self._disk / f"{step}{UNFINISHED}"
        for name in NEEDED:
            # A checkpoint that cannot be restored must not count.
            if not (folder / name).is_file():
                raise OSError(errno.EIO, f"{folder / name} was not written")
        write_digests(folder)

    def is_saved(self, step: int) -> bool:
        """Whether a step has its final name, which is synced to the disk."""
        if not self.place(step).exists():
            return False
        sync_folder(self._disk)
        return True

    def discard(self, step: int) -> None:
        """Removes partial files, which would fill the disk."""
        shutil.rmtree(self._disk / f"{step}{UNFINISHED}", ignore_errors=True)

    def require_room(self, size: int) -> None:
        """Requires 1.25 times the state and 1 MiB of free disk."""
        existing = (p for p in (self._disk, *self._disk.parents) if p.exists())
        need, free = int(1.25 * size) + 2**20, shutil.disk_usage(next(existing)).free
        if free < need:
            raise DiskFullError(
                errno.ENOSPC,
                f"no room for a checkpoint in {self._disk}: {need} bytes needed, "
                f"{free} free. Free some space and run the same command again",
            )

    def unlock(self) -> None:
        """Releases the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take(self) -> None:
        self._disk.mkdir(parents=True, exist_ok=True)
        if self._lock is None:
            self._lock = _lock(self._disk)
            # Only with the lock: another process may be writing what looks like
            # remains.
            self._clear_unfinished()

    def _clear_unfinished(self) -> None:
        for suffix in (UNFINISHED, DELETED):
            for leftover in self._disk.glob(f"*{suffix}"):
                if leftover.name.removesuffix(suffix).isdecimal():
                    shutil.rmtree(leftover)

    def _exists(self, step: int) -> bool:
        return self.place(step).exists()

    def _problems(self, step: int) -> list[str]:
        return problems(self.place(step))

    def _delete(self, step: int) -> None:
        # Renamed first: a half-deleted folder must not look like a damaged one.
        doomed = self._disk / f"{step}{DELETED}"
        self.place(step).rename(doomed)
        shutil.rmtree(doomed)

    def _set_aside(self, step: int) -> str:
        aside, n = self._disk / f"{step}.damaged", 1
        while aside.exists():
            n += 1
            aside = self._disk / f"{step}.damaged-{n}"
        self.place(step).rename(aside)
        return aside.name

    def _write_format(self) -> None:
        if not (self._disk / FORMAT_FILE).exists():
            write_atomically(self._disk / FORMAT_FILE, json.dumps(FORMAT))

    def _require_ours(self) -> None:
        if not self._disk.exists():
            return
        if not self._disk.is_dir():
            raise ValueError(f"{self._disk} is a file, not a folder of checkpoints")
        # The lock and half-written marker are hidden, and may be all there is so far.
        names = {p.name for p in self._disk.iterdir() if not p.name.startswith(".")}
        if not names:
            return
        self._require_marker(names)
        file = self._disk / FORMAT_FILE
        try:
            found = read_json(file)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{file} cannot be read: {short(error)}. The checkpoints do not depend "
                f"on it: write {json.dumps(FORMAT)} into it"
            ) from None
        self._require_format(found)


def _lock(directory: Path) -> Any:
    """Locks the folder for one run: two would overwrite each other's checkpoints."""
    file = os.fdopen(open_regular(directory / ".lock", os.O_RDWR | os.O_CREAT), "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise SaveError(
            errno.EBUSY, f"another process is saving checkpoints in {directory}"
        ) from None
    # Some network filesystems have no locks; training there is better than none.
    except OSError as error:
        logger.warning("%s cannot be locked (%s)", directory, error.strerror)
    return file
