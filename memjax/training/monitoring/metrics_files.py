"""Metrics files of a run: `metrics.jsonl` and TensorBoard's events.

A full or failing disk does not stop a run: it is reported once, and pending records are
written later.
"""

import importlib
import json
import logging
import os
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from memjax.buckets.writing import open_regular, write_atomically
from memjax.config_io import AnyPath, require_regular

METRICS_FILE = "metrics.jsonl"
logger = logging.getLogger(__name__)


class Appender:
    """Appends records to a file, and retries those that the disk refuses.

    Args:
        path: the file, created if need be.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is a link, or no regular file.
    """

    def __init__(self, path: Path):
        self._path = path
        # Unbuffered: the number of bytes that reached the file is known, so a record
        # cut short by a full disk is completed later and never written twice.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.fdopen(open_regular(path, flags), "ab", buffering=0)
        self._unwritten = b""
        self._failing = False

    def append(self, record: bytes) -> None:
        """Adds a record in one write, so that a kill cuts at most one short."""
        self._unwritten += record
        self._write()

    def sync(self) -> None:
        """Syncs all records to the disk, as far as possible."""
        self._write()
        with suppress(OSError):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """As `sync`, and closes the file."""
        self.sync()
        if self._unwritten:
            logger.error("the end of %s could not be written", self._path)
        with suppress(OSError):
            self._file.close()

    def _write(self) -> None:
        try:
            while self._unwritten:
                written = self._file.write(self._unwritten) or 0
                self._unwritten = self._unwritten[written:]
            self._failing = False
        except OSError as error:
            if not self._failing:
                logger.warning(
                    "%s cannot be written now (%s); training goes on, and missing "
                    "records will be written when possible",
                    self._path,
                    error.strerror,
                )
            self._failing = True


class EventsFile:
    """TensorBoard's events, written by the thread that trains.

    tensorboardX's own writer uses a thread and a queue of ten: the thread ends at the
    first error of the disk, and the full queue then blocks for ever.

    Args:
        folder: where TensorBoard looks, created if need be.
        purge_step: TensorBoard forgets earlier events from this step on.

    Raises:
        OSError: the folder or the file cannot be made.
    """

    def __init__(self, folder: Path, *, purge_step: int):
        folder.mkdir(parents=True, exist_ok=True)
        # The name that TensorBoard looks for, and sorts by.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
        self._file = Appender(folder / name)

        # Imported late: it imports torch where that is installed, which takes seconds.
        def part(name):
            return importlib.import_module(f"tensorboardX.{name}")

        self._events, self._summary = part("proto.event_pb2"), part("summary")
        self._checksum = part("record_writer").masked_crc32c
        log = self._events.SessionLog
        start = log(status=log.START)
        self._append(file_version="brain.Event:2")
        self._append(step=purge_step, session_log=start)

    def add(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Adds the values of one step, named `<kind>/<name>`."""
        for name, value in values.items():
            summary = self._summary.scalar(f"{kind}/{name}", value)
            self._append(step=step, summary=summary)

    def sync(self) -> None:
        """Syncs all events to the disk, as far as possible."""
        self._file.sync()

    def close(self) -> None:
        """As `sync`, and closes the file."""
        self._file.close()

    def _append(self, **fields: Any) -> None:
        event = self._events.Event(wall_time=time.time(), **fields).SerializeToString()
        size = struct.pack("<Q", len(event))

        def checksum(content):
            return struct.pack("<I", self._checksum(content))

        self._file.append(size + checksum(size) + event + checksum(event))


def keep_lines_until(path: Path, step: int) -> list[dict[str, Any]]:
    """Drops records after `step` and damaged lines; returns the rest."""
    if not path.exists():
        return []
    kept = [entry for entry in read_lines(path) if entry["step"] <= step]
    # Written under another name and moved, so that a kill loses nothing.
    write_atomically(path, "".join(json.dumps(entry) + "\n" for entry in kept))
    return kept


def read_lines(path: AnyPath) -> list[dict[str, Any]]:
    """Records of a metrics file, without damaged lines; empty if there is no file."""
    if not path.exists():
        return []
    require_regular(path)
    found = []
    lines = path.read_bytes().decode("utf-8", "replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            kinds = {"step": int, "kind": str, "values": dict}
            if any(type(entry[name]) is not kind for name, kind in kinds.items()):
                raise TypeError(f"step, kind or values of another type in {entry}")
            found.append(entry)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning("%s line %d dropped, not a record: %s", path, number, error)
    return found
