"""The claim on a folder of a disk: a locked file that names host and process.

The lock ends with the process, whatever ends it. Where a filesystem has no locks, a
process id tells whether it still runs. Neither says anything about another host: from
there, the file must stay as it is for a while.
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

from memjax.config_io import AnyPath

LOCK_FILE = ".lock"
#: How long another host's claim is watched for a sign of life, in seconds. Some network
#: filesystems show a change a minute late.
WATCH_SECONDS = 100.0

logger = logging.getLogger(__name__)


class LockedError(OSError):
    """Another process writes in the folder."""


class Owner(NamedTuple):
    """Who claims a folder; `beat` counts up while the process lives."""

    host: str
    pid: int
    beat: int


#: What a claim that is being written looks like.
UNREADABLE = Owner("", 0, 0)


class DiskLock:
    """Holds a folder of a disk until `release`.

    Args:
        folder: created if need be.
        verb: what an error says that the other process does there.

    Raises:
        LockedError: another process holds it; nothing was written.
    """

    def __init__(self, folder: Path, verb: str):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(folder / LOCK_FILE, flags, 0o666)
        try:
            self._require_unlocked(verb)
        except BaseException:
            os.close(self._file)
            raise

    def show(self, beat: int) -> None:
        """Writes who holds the folder, and that it lives."""
        owner = Owner(socket.gethostname(), os.getpid(), beat)
        # A full disk is no reason to stop: the lock holds without the text.
        with suppress(OSError):
            # Of one length, so that a reader never sees halves of two texts.
            os.pwrite(self._file, json.dumps(owner._asdict()).ljust(400).encode(), 0)
            os.fsync(self._file)

    def release(self) -> None:
        """Lets another process write here."""
        with suppress(OSError):
            # Emptied and not removed: a process that waits has the same file open.
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
        # With the lock in hand, whoever is named on this host has ended.
        here = owner is not None and owner.host == socket.gethostname()
        if owner is not None and not (here and locked):
            require_ended(self._folder, owner, verb, self._now)

    def _now(self) -> Owner | None:
        """None when it has just ended; as before where the file is not readable."""
        if not (self._folder / LOCK_FILE).stat().st_size:
            return None
        return self._owner() or UNREADABLE

    def _owner(self) -> Owner | None:
        try:
            return read_owner((self._folder / LOCK_FILE).read_bytes())
        except OSError:
            return None


def require_ended(
    folder: AnyPath, owner: Owner, verb: str, now: Callable[[], Owner | None]
) -> None:
    """Raises LockedError if whoever is named in a claim still lives.

    Args:
        folder: that is claimed.
        owner: who claims it.
        verb: as `DiskLock`.
        now: who claims it now; None when nobody does any more.
    """
    # A process id comes again, in containers mostly as 1: this one's says nothing.
    if owner.host == socket.gethostname() and owner.pid != os.getpid():
        if _is_running(owner.pid):
            raise refusal(folder, owner, verb)
        return
    logger.warning(
        "%s was claimed by process %d on %s: looking for %.0f seconds whether it "
        "still lives",
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
        # It is another user's.
        return True
    return True


def read_owner(content: bytes) -> Owner | None:
    """Who a claim names; None if nobody, or if it is not readable."""
    try:
        record: Any = json.loads(content)
        return Owner(str(record["host"]), int(record["pid"]), int(record["beat"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def refusal(folder: AnyPath, owner: Owner | None, verb: str) -> LockedError:
    """What says that a folder is in use, and by whom."""
    who = f"process {owner.pid} on {owner.host}" if owner else "another process"
    return LockedError(
        f"{folder} is in use: {who} {verb} there. Wait for it or stop it, or use "
        "another folder"
    )
