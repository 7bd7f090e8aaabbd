"""One process at a time writes in a folder: trains in a run's, talks in a memory's.

A claim is the file `.claim` in the folder: locked by the process that writes, and
naming its host and process id. The lock ends with the process, whatever ends it. Where
a filesystem has no locks, a process id tells whether it still runs. A lock or a process
id says nothing about another host: from there, the file must stay as it is for a while.
"""

import fcntl
import json
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax

from memjax.training.checkpoints.checkpoint import any_process
from memjax.training.checkpoints.folder import check_path

CLAIM_FILE = ".claim"
#: Seconds between two signs of life, and how long another host's claim is watched for
#: one. Some network filesystems show a change a minute late.
BEAT_SECONDS, WATCH_SECONDS = 20.0, 100.0

logger = logging.getLogger(__name__)


class ClaimedError(OSError):
    """Another process writes in the folder."""


class Owner(NamedTuple):
    """Who claims a folder; `beat` counts up while the process lives."""

    host: str
    pid: int
    beat: int


class Claim:
    """Holds a folder for this process, or all processes of this run, until closed.

    With several processes each makes the same calls, and the first holds the folder.

    Args:
        folder: of a run or a memory, created if need be.
        name: what an error calls the argument.
        verb: what an error says that the other process does there.

    Raises:
        ClaimedError: another process holds it; nothing was written.
        ValueError: checkpoints cannot be kept under that path.
    """

    def __init__(self, folder: Path, name: str = "run_dir", verb: str = "trains"):
        check_path(name, folder)
        self._file = None
        refusal = None
        if jax.process_index() == 0:
            try:
                self._file = _take(folder, verb)
            except ClaimedError as error:
                refusal = error
        if any_process(refusal is not None):
            raise refusal or ClaimedError(f"another process {verb} in {folder}")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)
        if self._file is not None:
            _write(self._file, 0)
            self._thread.start()

    def close(self) -> None:
        """Lets another process write here."""
        if self._file is None:
            return
        self._stopped.set()
        self._thread.join()
        file, self._file = self._file, None
        with suppress(OSError):
            # Emptied and not removed: a process that waits has the same file open.
            os.ftruncate(file, 0)
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)

    def __enter__(self) -> "Claim":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _live(self) -> None:
        """Shows other hosts that this process lives."""
        beat = 0
        while not self._stopped.wait(BEAT_SECONDS):
            beat += 1
            if self._file is not None:
                _write(self._file, beat)


def _take(folder: Path, verb: str) -> int:
    """The descriptor of the locked claim file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / CLAIM_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _require_unclaimed(folder, file, verb)
    except BaseException:
        os.close(file)
        raise
    return file


def _require_unclaimed(folder: Path, file: int, verb: str) -> None:
    owner = _read(folder)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked = True
    except BlockingIOError:
        raise _refusal(folder, owner, verb) from None
    except OSError as error:
        logger.warning("%s cannot be locked (%s)", folder, error.strerror)
        locked = False
    if owner is None:
        return
    if owner.host == socket.gethostname():
        # With the lock in hand, whoever is named has ended.
        if not locked and _is_running(owner.pid):
            raise _refusal(folder, owner, verb)
    elif _is_alive_elsewhere(folder, owner):
        raise _refusal(folder, owner, verb)


def _is_alive_elsewhere(folder: Path, owner: Owner) -> bool:
    """Watches the claim of another host for a sign of life."""
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
        now = _read(folder)
        if now is None and not (folder / CLAIM_FILE).stat().st_size:
            # It has just ended.
            return False
        if now is not None and now != owner:
            return True
    return False


def _is_running(pid: int) -> bool:
    # A process id comes again, in containers mostly as 1.
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        # It is another user's.
        return True
    return True


def _read(folder: Path) -> Owner | None:
    """Who the claim names; None if nobody, or if it is not readable."""
    try:
        record: Any = json.loads((folder / CLAIM_FILE).read_bytes())
        return Owner(str(record["host"]), int(record["pid"]), int(record["beat"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _write(file: int, beat: int) -> None:
    owner = Owner(socket.gethostname(), os.getpid(), beat)
    # A full disk is no reason to stop: the lock holds without the text.
    with suppress(OSError):
        # Of one length, so that a reader never sees halves of two texts.
        os.pwrite(file, json.dumps(owner._asdict()).ljust(400).encode(), 0)
        os.fsync(file)


def _refusal(folder: Path, owner: Owner | None, verb: str) -> ClaimedError:
    who = f"process {owner.pid} on {owner.host}" if owner else "another process"
    return ClaimedError(
        f"{folder} is in use: {who} {verb} there. Wait for it or stop it, or use "
        "another folder"
    )
