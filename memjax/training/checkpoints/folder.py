"""The folder of checkpoints: which ones are undamaged, which go, who may write.

Files and names only; `checkpoint.py` writes and reads what is inside a checkpoint, and
describes the layout.

orbax's `CheckpointManager` (0.12) does not do this. It deletes a checkpoint in place,
so that a kill leaves a numbered folder with some files gone. A save that fails counts
as one of those to keep, and the oldest good one is forgotten for it. Two managers save
in one folder, and delete each other's checkpoints. It knows neither damage nor a disk
without room.
"""

import errno
import fcntl
import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

from memjax.checks import short
from memjax.config_io import read_json
from memjax.training.checkpoints.checksums import problems, write_atomically

FORMAT_FILE = "memjax-checkpoints.json"
FORMAT = {"format": "memjax checkpoints", "version": 1}
UNFINISHED = ".orbax-checkpoint-tmp"
DELETED = ".deleted"

logger = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """The folder holds checkpoints, but none that can be used."""


class SaveError(OSError):
    """A checkpoint could not be written; the ones before it are untouched."""


class DiskFullError(SaveError):
    """There is no room for the next checkpoint."""


def check_path(name: str, path: Path | str) -> None:
    """Raises ValueError, naming the argument, where no checkpoints can be kept."""
    # A Path has lost one of the slashes: gs:/bucket/run would be a folder `gs:` here.
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        raise ValueError(
            f"{name} must be a path, got {str(path)!r}; mount a bucket as a filesystem "
            "to keep checkpoints there"
        )
    found = sorted({*str(Path(path).absolute())} & {*"[]\\"})
    if found:
        # orbax takes a path for a pattern, finds no files, and saves nothing but names.
        raise ValueError(
            f"{name} must not hold {' or '.join(found)} anywhere in its path, got "
            f"{str(Path(path).absolute())!r}: checkpoints there could not be read back"
        )


class Folder:
    """A folder of checkpoints. Looking changes nothing on the disk.

    Raises:
        ValueError: `path` is a file, or a folder with something else in it.
    """

    def __init__(self, path: Path):
        self.path = path
        self._damaged: set[int] = set()
        self._unreadable: set[int] = set()
        # Until `newest_good` was called nothing is known to be good, and nothing is
        # deleted.
        self._judged = False
        self._lock: Any = None
        _require_ours(path)

    def steps(self) -> list[int]:
        """The steps that have a folder, oldest first; damaged ones included."""
        if not self.path.is_dir():
            return []
        names = (p.name for p in self.path.iterdir() if p.is_dir())
        return sorted(int(name) for name in names if name.isdecimal())

    def newest_good(self) -> tuple[int, int]:
        """The newest step whose files agree with their digests, or -1.

        Every newer one is named in an error message; the second number counts them.
        Those that were given to `set_aside` are not looked at again.
        """
        self._damaged, self._judged = set(self._unreadable), True
        # Newest first, and no further than needed: digests of gigabytes take a while.
        left = self._steps_to_judge()
        while left:
            step = left.pop()
            wrong = problems(self.path / str(step))
            if not wrong:
                return step, len(self._damaged)
            if not (self.path / str(step)).exists():
                # A run that trains has dropped it, after it saved a newer one.
                left = self._steps_to_judge()
                continue
            self._damaged.add(step)
            _report_damage(self.path / str(step), wrong)
        return -1, len(self._damaged)

    def set_aside(self, step: int, error: Exception) -> None:
        """Counts a step as damaged that has its digests and could not be read.

        One that a run in training has dropped meanwhile is forgotten.
        """
        folder = self.path / str(step)
        if folder.exists():
            self._unreadable.add(step)
            _report_damage(folder, [str(error)])

    def _steps_to_judge(self) -> list[int]:
        return [step for step in self.steps() if step not in self._damaged]

    def make_ready(self, step: int, size: int, keep: int | None) -> None:
        """Prepares a save of `size` bytes at `step`: creates and locks the folder.

        Drops the oldest down to `keep`, where it is known which ones are good; None
        drops none.

        Raises:
            SaveError: another process has the lock.
            DiskFullError: there is no room.
            ValueError: a good checkpoint of this or a later step exists.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if self._lock is None:
            self._lock = _lock(self.path)
            # Only with the lock: another process may be writing what looks like
            # remains.
            self._clear_unfinished()
        self._require_newest(step)
        self._set_damaged_aside(step)
        if self._judged and keep is not None:
            self.drop_old(keep)
        require_room(self.path, size)
        if not (self.path / FORMAT_FILE).exists():
            write_atomically(self.path / FORMAT_FILE, json.dumps(FORMAT))

    def drop_old(self, keep: int) -> None:
        """Deletes all but the newest `keep`; damaged ones do not count and stay."""
        good = [step for step in self.steps() if step not in self._damaged]
        for step in good[:-keep]:
            # Renamed first: a half-deleted folder must not look like a damaged one.
            doomed = self.path / f"{step}{DELETED}"
            (self.path / str(step)).rename(doomed)
            shutil.rmtree(doomed)

    def unlock(self) -> None:
        """Lets another process save here."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _require_newest(self, step: int) -> None:
        # So that none of the `keep` newest is bad, and the save to come is newest.
        for later in self.steps():
            if later < step or later in self._damaged:
                continue
            wrong = problems(self.path / str(later))
            if not wrong:
                raise ValueError(
                    f"step {step} cannot be saved in {self.path}: step {later} is "
                    "already there, and good"
                )
            self._damaged.add(later)
            _report_damage(self.path / str(later), wrong)

    def _set_damaged_aside(self, step: int) -> None:
        folder = self.path / str(step)
        if not folder.exists():
            return
        aside, n = folder.with_name(f"{step}.damaged"), 1
        while aside.exists():
            n += 1
            aside = folder.with_name(f"{step}.damaged-{n}")
        # Kept, for its owner to look at: the save needs the name and not the room.
        folder.rename(aside)
        self._damaged.discard(step)
        logger.warning("damaged checkpoint %s is now %s", folder, aside.name)

    def _clear_unfinished(self) -> None:
        for suffix in (UNFINISHED, DELETED):
            for leftover in self.path.glob(f"*{suffix}"):
                if leftover.name.removesuffix(suffix).isdecimal():
                    shutil.rmtree(leftover)


def _report_damage(folder: Path, wrong: list[str]) -> None:
    shown = "; ".join(wrong[:3])
    more = f"; and {len(wrong) - 3} more files" if len(wrong) > 3 else ""
    logger.error(
        "checkpoint %s is damaged and will not be used: %s%s. It is left in place.",
        folder,
        shown,
        more,
    )


def _require_ours(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file, not a folder of checkpoints")
    if not directory.exists():
        return
    # The lock and half-written marker are hidden, and may be all there is so far.
    names = sorted(p.name for p in directory.iterdir() if not p.name.startswith("."))
    if not names:
        return
    if FORMAT_FILE not in names:
        raise ValueError(
            f"{directory} is not a folder of memjax checkpoints: it has no "
            f"{FORMAT_FILE}, but {', '.join(names[:5])}. If it is one that has lost "
            f"the file, write {json.dumps(FORMAT)} into it"
        )
    try:
        found = read_json(directory / FORMAT_FILE)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{directory / FORMAT_FILE} cannot be read: {short(error)}. The "
            f"checkpoints do not depend on it: write {json.dumps(FORMAT)} into it"
        ) from None
    if found != FORMAT:
        raise ValueError(
            f"{directory / FORMAT_FILE} must say {FORMAT}, it says {short(found)}: "
            "written by another version of memjax"
        )


def _lock(directory: Path) -> Any:
    """Holds the folder for one run: two would overwrite each other's checkpoints."""
    file = (directory / ".lock").open("w")
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


def require_room(directory: Path, size: int) -> None:
    """Refuses a save that the disk may not hold: 1.25 of the state and 1 MiB."""
    need, free = int(1.25 * size) + 2**20, shutil.disk_usage(_existing(directory)).free
    if free < need:
        raise DiskFullError(
            errno.ENOSPC,
            f"no room for a checkpoint in {directory}: {need} bytes needed, {free} "
            "free. Free some space and run the same command again",
        )


def _existing(directory: Path) -> Path:
    """The nearest folder that exists, on the same disk."""
    return next(p for p in (directory, *directory.parents) if p.exists())
