"""The folder of a run, on a disk or in a bucket: configuration, newest checkpoint."""

import json
import logging
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax

from memjax.buckets.local_copies import WorkingCopy
from memjax.buckets.writing import write_atomically
from memjax.config_io import AnyPath, from_record, read_json, to_record
from memjax.training.checkpoints.checkpoint import Checkpoints
from memjax.training.checkpoints.folder import check_path
from memjax.training.locks.lock import LOCK_FILE, FolderLock, LockedError
from memjax.training.resume import require_same_config
from memjax.training.step import TrainState

CONFIG_FILE = "config.json"
CHECKPOINTS = "checkpoints"

logger = logging.getLogger(__name__)


class RunFolder:
    """A run's folder, locked for this process until it is closed.

    Objects of a bucket cannot be appended to: there `files` is a local copy of the
    small files, uploaded with every save and on closing.

    Args:
        run_dir: the folder or its URL, created if need be. With several processes each
            makes the same calls.

    Attributes:
        run_dir: as a path.
        files: folder of configuration, metrics and reports.
        checkpoints: for `Checkpoints`.

    Raises:
        LockedError: another process trains there; nothing was written.
        ValueError: checkpoints cannot be kept under that path.
        OSError: a bucket does not answer as it should.
    """

    def __init__(self, run_dir: AnyPath | str):
        self.run_dir = check_path("run_dir", run_dir)
        self.checkpoints = self.run_dir / CHECKPOINTS
        self._copy: WorkingCopy | None = None
        self._failing = False
        self._lock = FolderLock(self.run_dir)
        if isinstance(self.run_dir, Path):
            self.files = self.run_dir
            return
        # Services that show metrics name a run as its folder.
        self._temporary = Path(tempfile.mkdtemp(prefix="memjax-run-"))
        self.files = self._temporary / self.run_dir.name
        self.files.mkdir()
        skip = (CHECKPOINTS, LOCK_FILE)
        try:
            self._copy = WorkingCopy(self.run_dir, self.files, skip)
        except BaseException:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._lock.close()
            raise

    def push(self) -> None:
        """Uploads changed files to the bucket; a no-op on a disk.

        A bucket that refuses them does not stop training: they follow next time.

        Raises:
            LockedError: another process has taken the folder meanwhile.
        """
        try:
            self._push()
            self._failing = False
        except LockedError:
            raise
        except OSError as error:
            if not self._failing:
                logger.warning("metrics are not copied now: %s", error.strerror)
            self._failing = True

    def _push(self) -> None:
        if self._copy is not None and jax.process_index() == 0:
            self._lock.require_held()
            self._copy.push()

    def close(self) -> None:
        """Uploads changed files a last time, and unlocks the folder.

        Raises:
            OSError: the bucket refuses them.
        """
        try:
            self._push()
        finally:
            if self._copy is not None:
                shutil.rmtree(self._temporary, ignore_errors=True)
                self._copy = None
            self._lock.close()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        try:
            self.close()
        except OSError as failure:
            if error is None:
                raise
            # The body's own error comes first.
            error.add_note(f"The last files were not copied either: {failure}")


def record_config(config: Any, folder: RunFolder, may_change: Collection[str]) -> None:
    """Writes the run's configuration into its folder.

    Raises:
        ValueError: the folder has another run's; the message names the fields that
            differ.
    """
    file, record = folder.files / CONFIG_FILE, to_record(config)
    if file.exists():
        stored = to_record(read_config(type(config), folder.files))
        # Before anything is overwritten in another run's folder.
        require_same_config(stored, record, may_change, str(folder.run_dir))
    # The folder is shared: only the process that holds its lock writes.
    if jax.process_index() == 0:
        write_atomically(file, json.dumps(record, indent=1))


def read_config(kind: type, run_dir: AnyPath) -> Any:
    """The configuration that `record_config` wrote, a dataclass of the kind.

    Raises:
        ValueError: if the folder is no run, or its configuration is of another kind.
    """
    run_dir = check_path("run_dir", run_dir)
    file = run_dir / CONFIG_FILE
    if not file.is_file():
        raise ValueError(
            f"run_dir={str(run_dir)!r} holds no run: no {CONFIG_FILE} in it"
        )
    try:
        record = read_json(file)
    except ValueError as error:
        raise ValueError(
            f"{error}. The run's own training command writes it again if you delete "
            "it; the checkpoints do not need it"
        ) from error
    return from_record(kind, record, f"{file}: config")


def newest_state(run_dir: AnyPath, state: TrainState) -> TrainState:
    """Newest undamaged checkpoint of a run, with the shapes of `state`.

    Raises:
        ValueError: if there is none, or it is unreadable or of another state.
    """
    with Checkpoints(run_dir / CHECKPOINTS) as checkpoints:
        restored = checkpoints.restore(state)
    if restored is None:
        raise ValueError(f"run_dir={str(run_dir)!r} has no checkpoint yet")
    return restored.state
