"""Asynchronous, verified checkpoints of a training run, of which the newest n remain.

The only module that uses the checkpoint library (orbax). Layout of the folder:

    memjax-checkpoints.json   format and its version
    500/                      one checkpoint: the state, the meta record, and
                              digests.json with a sha256 for each of their files
    1000.orbax-checkpoint-tmp an interrupted save: never read, removed by the next
    250.damaged               see below

A checkpoint is written into a temporary folder, which is renamed to its step once the
digests are taken: after a kill, a numbered folder is either complete or absent. In a
bucket there are no temporary names: see `bucket_folder.py`.

A numbered folder that fails its digests is *damaged*. It is reported, skipped and never
deleted; a new save of that step first renames it `<step>.damaged` (`.damaged-2`, ...).
Damaged folders do not count among the `keep` newest.
"""

import errno
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from memjax.buckets.bucket import is_bucket
from memjax.buckets.store import is_of_store, with_advice
from memjax.config_io import AnyPath
from memjax.training.checkpoints.bucket_folder import BucketFolder
from memjax.training.checkpoints.disk_folder import DiskFolder
from memjax.training.checkpoints.folder import (
    CheckpointError,
    DiskFullError,
    Folder,
    RetryableError,
    SaveError,
    check_path,
)
from memjax.training.checkpoints.tree_spec import describe, require_same, with_shardings

logger = logging.getLogger(__name__)


class Restored(NamedTuple):
    """A restored checkpoint: step, state, and JSON record."""

    step: int
    state: PyTree
    meta: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, in one folder of a filesystem or a bucket.

    Opening and restoring change nothing on the disk; the first save creates and locks
    the folder, and removes interrupted saves. All processes make the same calls.

    Args:
        directory: the folder, which may be a URL of gs:// or s3://; created by the
            first save.
        keep: how many of the newest good checkpoints stay, at least 1.

    Raises:
        ValueError: `keep` < 1, or `directory` is a file, a URL of another scheme, a
            path with [, ] or a backslash, or a folder with something else in it.
    """

    def __init__(self, directory: AnyPath | str, *, keep: int = 3):
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.keep = keep
        self._folder = open_folder(directory)
        self.directory = self._folder.path
        self._saving: int | None = None
        self._unsynced: int | None = None
        self._drop_old = True
        self._primary = jax.process_index() == 0
        self._writer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(),
            # Digests are taken in the writer's thread, and training does not wait for
            # them.
            async_options=ocp.AsyncOptions(
                post_finalization_callback=lambda: self._folder.seal(self._written())
            ),
        )

    def steps(self) -> list[int]:
        """The steps that have a folder, oldest first; damaged ones included."""
        return self._folder.steps()

    def save(
        self, step: int, state: PyTree, meta: dict[str, Any], *, drop_old: bool = True
    ) -> None:
        """Starts writing a checkpoint and returns once `state` may be overwritten.

        First finishes the save before this one, and raises its failure (`check` raises
        it sooner, `wait` for certain).

        Args:
            step: >= 0; if it or a later one is already there, that must be damaged.
            state: pytree of JAX arrays, typed PRNG keys included.
            meta: anything JSON can hold.
            drop_old: whether the oldest may go for this one, down to `keep`.

        Raises:
            ValueError: a leaf is no JAX array, `meta` is not JSON, or a good
                checkpoint of this or a later step exists.
            DiskFullError: the filesystem lacks the room; nothing was written.
            RetryableError: a bucket fails or refuses.
            SaveError: this or the previous save failed.
        """
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        # Described before anything is written, so that a bad state leaves no trace.
        record = {"step": step, "leaves": describe(state), "meta": _as_json(meta)}
        self.wait()
        if self._primary:
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
            try:
                self._folder.make_ready(step, size, self.keep if drop_old else None)
            except SaveError:
                raise
            except OSError as error:
                self._saving = step
                raise self._failure(error) from error
        if jax.process_count() > 1 and is_bucket(self.directory):
            # Remains of a save that was cut short have the step's own name.
            multihost_utils.sync_global_devices(f"ready for step {step}")
        self._saving, self._drop_old = step, drop_old
        self._unsynced = step if self._primary else None
        try:
            self._writer.save(
                self._folder.place(step),
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record)
                ),
            )
        except OSError as error:
            raise self._failure(error) from error

    def check(self) -> None:
        """Raises the failure of the running save, if it has failed; never waits.

        To be called often: it also syncs the final name of a checkpoint to the disk.
        """
        try:
            self._writer.check_for_errors()
        except Exception as error:
            raise self._failure(error) from error
        self._sync_name()

    def wait(self) -> None:
        """Waits until the running save is on the disk, then deletes the oldest.

        Raises:
            SaveError: it failed; `DiskFullError` if the disk is full.
        """
        try:
            self._writer.wait_until_finished()
        except Exception as error:
            # The rest of a save whose failure was raised when it began.
            if self._saving is not None:
                raise self._failure(error) from error
        self._sync_name()
        if self._saving is not None and self._primary and self._drop_old:
            # Only now: until the new one is on the disk, an old one is the newest.
            try:
                self._folder.drop_old(self.keep)
            except OSError as error:
                # What is saved is saved, and the next save deletes more.
                logger.warning("old checkpoints stay for now: %s", error.strerror)
        self._saving = None

    def restore(
        self,
        abstract_state: PyTree,
        *,
        accept: Callable[[dict[str, Any]], None] | None = None,
    ) -> Restored | None:
        """Restores the newest undamaged checkpoint.

        Args:
            abstract_state: arrays or `jax.ShapeDtypeStruct`s; each leaf lands on its
                sharding, or on the first device where it has none.
            accept: is given the meta record before any array is read or compared,
                and may raise: CheckpointError where the record makes no sense, which
                the next older checkpoint may do.

        Returns:
            None when nothing was ever saved here.

        Raises:
            CheckpointError: there are checkpoints, and every one is damaged.
            OSError: a bucket fails or refuses.
            ValueError: a leaf is missing, not expected, or of another shape or dtype.
        """
        self.wait()
        while (step := self._newest_good()) is not None:
            found, failure = None, CheckpointError("another process cannot read it")
            try:
                found = self._restore(step, abstract_state, accept)
            except CheckpointError as error:
                failure = error
            # A checkpoint that one process cannot read is one that no process reads.
            if not any_process(found is None):
                return found
            self._folder.set_aside(step, failure)
        return None

    def _restore(
        self,
        step: int,
        abstract_state: PyTree,
        accept: Callable[[dict[str, Any]], None] | None,
    ) -> Restored:
        """Reads one checkpoint; CheckpointError if its content makes no sense."""
        record = self._read(step, record=ocp.args.JsonRestore())["record"]
        where = f"checkpoint {self.directory / str(step)}"
        if not isinstance(record, dict) or not all(
            isinstance(record.get(name), dict) for name in ("leaves", "meta")
        ):
            raise CheckpointError(f"{where} has a record without leaves or meta")
        if accept is not None:
            # The caller may refuse, or free its own arrays to make room for these.
            accept(record["meta"])
        # Before arrays are read, with every leaf that differs in the message.
        try:
            require_same(record["leaves"], describe(abstract_state), where)
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{where} has a record of no leaves") from error
        target = ocp.args.StandardRestore(with_shardings(abstract_state))
        state = self._read(step, state=target)["state"]
        return Restored(step=step, state=state, meta=record["meta"])

    def require_room(self, state: PyTree) -> None:
        """Raises DiskFullError if a first checkpoint of `state` would not fit."""
        if self._primary and not self.steps():
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
            self._folder.require_room(size)

    def close(self) -> None:
        """Waits for the running save and unlocks the folder; raises as `wait` does."""
        try:
            self.wait()
        finally:
            self._writer.close()
            self._folder.unlock()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        try:
            self.close()
        except SaveError as failure:
            if error is None:
                raise
            # The body's own error is the one to see first.
            error.add_note(f"The last save failed as well: {failure}")

    def _sync_name(self) -> None:
        """Syncs the final name of the running save to the disk, once it has it."""
        step = self._unsynced
        if step is not None and self._folder.is_saved(step):
            self._unsynced = None

    def _written(self) -> int:
        """The step that is being saved, for the writer's thread."""
        assert self._saving is not None
        return self._saving

    def _read(self, step: int, **args: Any) -> Any:
        try:
            self._folder.bring(step)
            return self._writer.restore(
                self._folder.place(step), args=ocp.args.Composite(**args)
            )
        except Exception as error:
            # A store that fails has damaged nothing, and an older checkpoint must not
            # be continued in place of this one.
            if is_bucket(self.directory) and is_of_store(error):
                text = f"cannot read {self.directory / str(step)}: {shortened(error)}"
                raise OSError(errno.EIO, with_advice(text, error)) from error
            raise CheckpointError(
                f"it has the digests it was written with but cannot be read: "
                f"{shortened(error)}"
            ) from error

    def _newest_good(self) -> int | None:
        # One process judges for all, so that all restore the same step.
        found = self._folder.newest_good() if self._primary else (-1, 0)
        if jax.process_count() > 1:
            found = tuple(
                int(n) for n in multihost_utils.broadcast_one_to_all(np.asarray(found))
            )
        good, bad = found
        if good < 0 and bad:
            raise CheckpointError(
                f"no checkpoint in {self.directory} can be used; damaged: "
                f"{', '.join(str(step) for step in reversed(self.steps()))} "
                "(the files are named in the messages above)"
            )
        return good if good >= 0 else None

    def _failure(self, error: Exception) -> SaveError:
        """The error of a failed save, after removal of its partial files."""
        step, self._saving = self._saving, None
        self._unsynced = None
        if self._primary and step is not None:
            self._folder.discard(step)
        text = f"saving step {step} in {self.directory} failed: {shortened(error)}"
        code = error.errno if isinstance(error, OSError) else None
        # Some errors of the writer carry the system's text and not its number.
        if code == errno.ENOSPC or "No space left" in str(error):
            return DiskFullError(errno.ENOSPC, text)
        if is_bucket(self.directory):
            return RetryableError(code or errno.EIO, with_advice(text, error))
        return SaveError(code or errno.EIO, text)


def open_folder(directory: AnyPath | str) -> Folder:
    """The folder of checkpoints, with their steps.

    Raises:
        ValueError: as `Checkpoints`.
    """
    path = check_path("directory", directory)
    return DiskFolder(path) if isinstance(path, Path) else BucketFolder(path)


def any_process(flag: bool) -> bool:
    """Whether the flag is true on any process; called by all."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


def shortened(error: Exception) -> str:
    """The error's text, of long ones the beginning and the end, which has the cause."""
    plain = isinstance(error, OSError) and not error.filename and error.strerror
    text = " ".join(str(plain or error).split())
    return text if len(text) <= 500 else f"{text[:250]} ... {text[-250:]}"


def _as_json(meta: dict[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(meta))
    except (TypeError, ValueError) as error:
        raise ValueError(f"meta must be JSON: {error}") from error
