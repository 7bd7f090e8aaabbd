"""Goodput: share of a run's time spent in steps that count, over all restarts.

`goodput.json` in the run's folder has the time of the first start, the number of
starts, and the seconds of steps up to each saved one. On resuming, the seconds of steps
after the restored one are dropped.
"""

import json
import logging
import time
from pathlib import Path

from memjax.buckets.writing import write_atomically
from memjax.checks import short
from memjax.config_io import read_json

GOODPUT_FILE = "goodput.json"
logger = logging.getLogger(__name__)


class Goodput:
    """Counts the seconds of steps; a failing disk does not stop a run.

    Args:
        folder: of the run.
        step: of the start, 0 or the restored one.
    """

    def __init__(self, folder: Path, step: int):
        self._file, self._failing = folder / GOODPUT_FILE, False
        first_start, starts, marks = _read(self._file)
        self._first_start, self.starts = min(first_start, time.time()), starts + 1
        self._marks = [mark for mark in marks if mark[0] <= step]
        self._seconds = self._marks[-1][1] if self._marks else 0.0
        self._write()

    def add(self, seconds: float) -> None:
        """Adds the time of completed steps."""
        self._seconds += seconds

    def mark(self, step: int) -> None:
        """Records the seconds up to a step that is about to be saved."""
        self._marks.append((step, self._seconds))
        self._write()

    def share(self) -> float:
        """Goodput since the first start, 0 to 1."""
        passed = time.time() - self._first_start
        # Clocks may be set back.
        return min(1.0, self._seconds / passed) if passed > 0 else 1.0

    def _write(self) -> None:
        record = {
            "first_start": self._first_start,
            "starts": self.starts,
            "seconds_at": self._marks,
        }
        try:
            write_atomically(self._file, json.dumps(record))
            self._failing = False
        except OSError as error:
            if not self._failing:
                said = "%s cannot be written now (%s); training goes on"
                logger.warning(said, self._file, error.strerror)
            self._failing = True


def _read(file: Path) -> tuple[float, int, list[tuple[int, float]]]:
    """The record; that of a new run if it is missing or damaged."""
    try:
        record = read_json(file)
        marks = [(int(step), float(seconds)) for step, seconds in record["seconds_at"]]
        return float(record["first_start"]), int(record["starts"]), marks
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        logger.warning("%s is restarted, as it cannot be read: %s", file, short(error))
    return time.time(), 0, []
