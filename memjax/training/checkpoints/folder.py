"""Names, damage, deletion and locking in a folder of checkpoints.

`checkpoint.py` reads and writes their content, and describes the layout. `DiskFolder`
and `BucketFolder` are the two kinds.

Reasons against orbax's `CheckpointManager` (0.12): it deletes a checkpoint in place, so
that a kill leaves a numbered folder without some files; a failed save counts among
those to keep, at the cost of the oldest good one; two managers in one folder delete
each other's checkpoints; damage and full disks are not handled.
"""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

from memjax.buckets.bucket import as_path, is_bucket
from memjax.checks import short
from memjax.config_io import AnyPath

FORMAT_FILE = "memjax-checkpoints.json"
FORMAT = {"format": "memjax checkpoints", "version": 1}
#: Files without which a checkpoint cannot be read.
NEEDED = ("state/manifest.ocdbt", "record/metadata")

logger = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """None of the checkpoints in the folder can be used."""


class SaveError(OSError):
    """A checkpoint could not be written; earlier ones are untouched."""


class RetryableError(SaveError):
    """A checkpoint could not be written now, and may be later."""


class DiskFullError(RetryableError):
    """There is no room for the next checkpoint."""


def check_path(name: str, path: AnyPath | str) -> AnyPath:
    """Path of a disk or a bucket.

    Raises:
        ValueError: naming the argument, where no checkpoints can be kept.
    """
    try:
        found = as_path(path)
    except ValueError as error:
        raise ValueError(f"{name}={error}") from None
    if is_bucket(found):
        return found
    wrong = sorted({*str(found.absolute())} & {*"[]\\"})
    if wrong:
        # orbax takes a path for a pattern, finds no files, and saves nothing but names.
        raise ValueError(
            f"{name} must not hold {' or '.join(wrong)} anywhere in its path, got "
            f"{str(found.absolute())!r}: checkpoints there could not be read back"
        )
    return found


class Folder(ABC):
    """A folder of checkpoints; reading changes nothing in it.

    Args:
        path: of a disk or a bucket.

    Raises:
        ValueError: `path` is a file, or a folder with something else in it.
    """

    def __init__(self, path: AnyPath):
        self.path = path
        self._damaged: set[int] = set()
        self._unreadable: set[int] = set()
        # Until `newest_good` was called nothing is known to be good, and nothing is
        # deleted.
        self._judged = False

    @abstractmethod
    def steps(self) -> list[int]:
        """Steps of the checkpoints, oldest first; damaged ones included."""

    @abstractmethod
    def place(self, step: int) -> AnyPath:
        """Path of a step for the checkpoint library, to read after `bring`."""

    @abstractmethod
    def bring(self, step: int) -> None:
        """Downloads a step, if need be."""

    @abstractmethod
    def seal(self, step: int) -> None:
        """Takes the digests of a written step, before it counts as saved.

        Raises:
            OSError: a file is missing, or cannot be read.
        """

    @abstractmethod
    def is_saved(self, step: int) -> bool:
        """Whether a step is saved, safe from a power cut."""

    @abstractmethod
    def discard(self, step: int) -> None:
        """Removes partial files of a failed save, as far as possible."""

    @abstractmethod
    def require_room(self, size: int) -> None:
        """Raises DiskFullError if a state of `size` bytes does not fit."""

    @abstractmethod
    def unlock(self) -> None:
        """Releases the lock."""

    @abstractmethod
    def _take(self) -> None:
        """Creates and locks the folder, and removes interrupted saves."""

    @abstractmethod
    def _exists(self, step: int) -> bool:
        """Whether a step has a checkpoint."""

    @abstractmethod
    def _problems(self, step: int) -> list[str]:
        """Differences from the digests, one line per file."""

    @abstractmethod
    def _delete(self, step: int) -> None:
        """Deletes so that a kill never leaves a seemingly damaged checkpoint."""

    @abstractmethod
    def _set_aside(self, step: int) -> str:
        """Renames a damaged checkpoint; returns its new name."""

    @abstractmethod
    def _write_format(self) -> None:
        """Writes `FORMAT_FILE`, unless it is there."""

    def newest_good(self) -> tuple[int, int]:
        """Newest step with matching digests, or -1.

        Every newer one is named in an error message; the second number counts them.
        Those that were given to `set_aside` are not looked at again.
        """
        self._damaged, self._judged = set(self._unreadable), True
        # Newest first, and no further than needed: digests of gigabytes take a while.
        left = self._steps_to_judge()
        while left:
            step = left.pop()
            wrong = self._problems(step)
            if not wrong:
                return step, len(self._damaged)
            if not self._exists(step):
                # A run that trains has dropped it, after it saved a newer one.
                left = self._steps_to_judge()
                continue
            self._damaged.add(step)
            self._report_damage(step, wrong)
        return -1, len(self._damaged)

    def set_aside(self, step: int, error: Exception) -> None:
        """Counts a step as damaged that has its digests and could not be read.

        One that a run in training has dropped meanwhile is forgotten.
        """
        if self._exists(step):
            self._unreadable.add(step)
            self._report_damage(step, [str(error)])

    def make_ready(self, step: int, size: int, keep: int | None) -> None:
        """Prepares a save of `size` bytes at `step`: creates the folder, and locks it.

        Drops the oldest down to `keep`, where it is known which ones are good; None
        drops none.

        Raises:
            SaveError: another process has the lock.
            DiskFullError: there is no room.
            ValueError: a good checkpoint of this or a later step exists.
        """
        self._take()
        self._require_newest(step)
        if self._exists(step):
            # Kept, for its owner to look at: the save needs the name, not the room.
            aside = self._set_aside(step)
            self._damaged.discard(step)
            logger.warning("damaged checkpoint %s/%d is now %s", self.path, step, aside)
        if self._judged and keep is not None:
            self.drop_old(keep)
        self.require_room(size)
        self._write_format()

    def drop_old(self, keep: int) -> None:
        """Deletes all but the newest `keep`; damaged ones neither count nor go."""
        for step in self._steps_to_judge()[:-keep]:
            self._delete(step)

    def _steps_to_judge(self) -> list[int]:
        return [step for step in self.steps() if step not in self._damaged]

    def _require_newest(self, step: int) -> None:
        # So that none of the `keep` newest is bad, and the save to come is newest.
        for later in self._steps_to_judge():
            if later < step:
                continue
            wrong = self._problems(later)
            if not wrong:
                raise ValueError(
                    f"step {step} cannot be saved in {self.path}: step {later} is "
                    "already there, and good"
                )
            self._damaged.add(later)
            self._report_damage(later, wrong)

    def _report_damage(self, step: int, wrong: list[str]) -> None:
        shown = "; ".join(wrong[:3])
        more = f"; and {len(wrong) - 3} more files" if len(wrong) > 3 else ""
        logger.error(
            "checkpoint %s/%d is damaged and will not be used: %s%s. It is left in "
            "place.",
            self.path,
            step,
            shown,
            more,
        )

    def _require_marker(self, names: Collection[str]) -> None:
        if FORMAT_FILE not in names:
            raise ValueError(
                f"{self.path} is not a folder of memjax checkpoints: it has no "
                f"{FORMAT_FILE}, but {', '.join(sorted(names)[:5])}. If it is one that "
                f"has lost the file, write {json.dumps(FORMAT)} into it"
            )

    def _require_format(self, found: Any) -> None:
        if found != FORMAT:
            raise ValueError(
                f"{self.path / FORMAT_FILE} must say {FORMAT}, it says {short(found)}: "
                "written by another version of memjax"
            )
