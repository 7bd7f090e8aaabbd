"""Lock on the folder of a run or a memory, for one writing process at a time.

The lock is `.lock` in the folder, a file on a disk (`disk_lock.py`) or an object in a
bucket (`bucket_lock.py`), with host, process id and a heartbeat counter.
"""

import threading
from pathlib import Path

import jax

from memjax.config_io import AnyPath
from memjax.training.checkpoints.checkpoint import any_process
from memjax.training.checkpoints.folder import check_path
from memjax.training.locks.bucket_lock import BucketLock
from memjax.training.locks.disk_lock import LOCK_FILE as LOCK_FILE
from memjax.training.locks.disk_lock import DiskLock
from memjax.training.locks.disk_lock import LockedError as LockedError

#: Seconds between two heartbeats.
BEAT_SECONDS = 20.0


class FolderLock:
    """Holds a folder for this process, or all processes of this run, until closed.

    All processes make the same calls; the first one holds the folder.

    Args:
        folder: of a run or a memory, created if need be.
        name: of the argument, for errors.
        verb: activity of the other process, for errors.

    Raises:
        LockedError: another process holds it; nothing was written.
        ValueError: checkpoints cannot be kept under that path, or its lock is no
            regular file.
    """

    def __init__(self, folder: AnyPath, name: str = "run_dir", verb: str = "trains"):
        path = check_path(name, folder)
        self._held: DiskLock | BucketLock | None = None
        refusal = None
        if jax.process_index() == 0:
            try:
                if isinstance(path, Path):
                    self._held = DiskLock(path, verb)
                else:
                    self._held = BucketLock(path, verb)
            # The others wait for this process to say so.
            except (LockedError, ValueError) as error:
                refusal = error
        if any_process(refusal is not None):
            raise refusal or LockedError(f"another process {verb} in {folder}")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)
        if self._held is not None:
            self._held.show(0)
            self._thread.start()

    def require_held(self) -> None:
        """Raises LockedError if another process has taken a folder of a bucket."""
        if isinstance(self._held, BucketLock):
            self._held.require_held()

    def close(self) -> None:
        """Releases the folder."""
        if self._held is None:
            return
        self._stopped.set()
        self._thread.join()
        held, self._held = self._held, None
        held.release()

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _live(self) -> None:
        """Writes a heartbeat for other hosts."""
        beat = 0
        while not self._stopped.wait(BEAT_SECONDS):
            beat += 1
            if self._held is not None:
                self._held.show(beat)
