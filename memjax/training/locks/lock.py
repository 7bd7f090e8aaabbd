"""One process at a time writes in a folder: trains in a run's, talks in a memory's.

A claim is `.lock` in the folder: `disk_lock.py` on a disk, `bucket_lock.py` in a
bucket. Both name host and process id, and count up while the process lives.
"""

import threading
from pathlib import Path
from types import TracebackType

import jax

from memjax.config_io import AnyPath
from memjax.training.checkpoints.checkpoint import any_process
from memjax.training.checkpoints.folder import check_path
from memjax.training.locks.bucket_lock import BucketLock
from memjax.training.locks.disk_lock import LOCK_FILE as LOCK_FILE
from memjax.training.locks.disk_lock import DiskLock
from memjax.training.locks.disk_lock import LockedError as LockedError

#: Seconds between two signs of life.
BEAT_SECONDS = 20.0


class FolderLock:
    """Holds a folder for this process, or all processes of this run, until closed.

    With several processes each makes the same calls, and the first holds the folder.

    Args:
        folder: of a run or a memory, created if need be.
        name: what an error calls the argument.
        verb: what an error says that the other process does there.

    Raises:
        LockedError: another process holds it; nothing was written.
        ValueError: checkpoints cannot be kept under that path.
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
            except LockedError as error:
                refusal = error
        if any_process(refusal is not None):
            raise refusal or LockedError(f"another process {verb} in {folder}")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)
        if self._held is not None:
            self._held.show(0)
            self._thread.start()

    def require_held(self) -> None:
        """Raises LockedError where another process has taken a folder of a bucket."""
        if isinstance(self._held, BucketLock):
            self._held.require_held()

    def close(self) -> None:
        """Lets another process write here."""
        if self._held is None:
            return
        self._stopped.set()
        self._thread.join()
        held, self._held = self._held, None
        held.release()

    def __enter__(self) -> "FolderLock":
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
            if self._held is not None:
                self._held.show(beat)
