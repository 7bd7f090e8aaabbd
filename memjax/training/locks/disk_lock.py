"""Lock on a folder of a disk: a locked file with host, process id and heartbeat.

The operating system releases the lock when the process ends. Without locks of the
filesystem the process id is checked, and from another host the heartbeat.
"""

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from memjax.buckets.writing import open_regular
from memjax.config_io import AnyPath

LOCK_FILE = ".lock"
#: Bytes of a lock that are read.
MAX_LOCK = 4096
#: Seconds to wait for a heartbeat of another host. Some network filesystems show a
#: change a minute late.
WATCH_SECONDS = 100.0

logger = logging.getLogger(__name__)


class LockedError(OSError):
    """Another process holds the folder."""


class Owner(NamedTuple):
    """Holder of a lock; `beat` counts its heartbeats."""

    host: str
    pid: int
    beat: int


#: Stands for a lock that is being written.
UNREADABLE = Owner("", 0, 0)


class DiskLock:
    """Holds a folder of a disk until `release`.

    Args:
        folder: created if need be.
        verb: activity of the other process, for errors.

    Raises:
        LockedError: another process holds it; nothing was written.
        ValueError: the lock is a link, or no regular file.
    """

    def __init__(self, folder: Path, verb: str):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._file = open_regular(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT)
        try:
            self._require_unlocked(verb)
        except BaseException:
            os.close(self._file)
            raise

    def show(self, beat: int) -> None:
        """Writes the holder and a heartbeat."""
        owner = Owner(socket.gethostname(), os.getpid(), beat)
        # The lock holds without the text if the disk is full.
        with suppress(OSError):
            # Of constant length, so that a reader never sees parts of two texts.
            os.pwrite(self._file, json.dumps(owner._asdict()).ljust(400).encode(), 0)
            os.fsync(self._file)

    def release(self) -> None:
        """Releases the folder."""
        with suppress(OSError):
            # Emptied, not removed: waiting processes have the same file open.
            os.ftruncate(self._file, 0)
        with suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_UN)
        os.close(self._file)

    def _require_unlocked(self, verb: str) -> None:
        owner = self._owner()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except BlockingIOError:
            raise refusal(self._folder, owner, verb) from None
        except OSError as error:
            logger.warning("%s cannot be locked (%s)", self._folder, error.strerror)
            locked = False
        # With the lock in hand, a holder on this host has ended.
        here = owner is not None and owner.host == socket.gethostname()
        if owner is not None and not (here and locked):
            require_ended(self._folder, owner, verb, self._now)

    def _now(self) -> Owner | None:
        """The present holder; None if it has released the folder."""
        if not (self._folder / LOCK_FILE).stat().st_size:
            return None
        return self._owner() or UNREADABLE

    def _owner(self) -> Owner | None:
        try:
            # Opened anew: a network filesystem may show an open file as it was.
            file = open_regular(self._folder / LOCK_FILE, os.O_RDONLY)
        except (OSError, ValueError):
            return None
        with os.fdopen(file, "rb") as stream:
            return read_owner(stream.read(MAX_LOCK))


def require_ended(
    folder: AnyPath, owner: Owner, verb: str, now: Callable[[], Owner | None]
) -> None:
    """Raises LockedError if the process named in a lock still runs.

    Args:
        folder: of the lock.
        owner: the process.
        verb: as `DiskLock`.
        now: reads the lock again; None once it is released.
    """
    # Process ids repeat, in containers mostly as 1: this process's own proves nothing.
    if owner.host == socket.gethostname() and owner.pid != os.getpid():
        if _is_running(owner.pid):
            raise refusal(folder, owner, verb)
        return
    logger.warning(
        "%s was locked by process %d on %s: waiting %.0f seconds for a heartbeat",
        folder,
        owner.pid,
        owner.host,
        WATCH_SECONDS,
    )
    deadline = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < deadline:
        time.sleep(WATCH_SECONDS / 50)
        found = now()
        if found is None:
            return
        if found not in (owner, UNREADABLE):
            raise refusal(folder, owner, verb)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        # Of another user.
        return True
    return True


def read_owner(content: bytes) -> Owner | None:
    """The holder named in a lock; None if unreadable."""
    try:
        record: Any = json.loads(content)
        return Owner(str(record["host"]), int(record["pid"]), int(record["beat"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def refusal(folder: AnyPath, owner: Owner | None, verb: str) -> LockedError:
    """The error of a folder in use, with its holder."""
    who = f"process {owner.pid} on {owner.host}" if owner else "another process"
    return LockedError(
        f"{folder} is in use: {who} {verb} there. Wait for it or stop it, or use "
        "another folder"
    )
