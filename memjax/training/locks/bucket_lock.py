"""Lock on a folder of a bucket: an object with host, process id and heartbeat.

A bucket does not release locks of ended processes: another host takes over the object
after a time without heartbeat. It is read again after writing: of two processes that
take it at once, the last one keeps it.
"""

import json
import logging
import os
import socket
import time
import uuid
from contextlib import suppress

from memjax.buckets.bucket import Bucket
from memjax.config_io import AnyPath
from memjax.training.locks.disk_lock import (
    LOCK_FILE,
    Owner,
    read_owner,
    refusal,
    require_ended,
)

#: Seconds until another process that takes the same lock has written it too.
SETTLE_SECONDS = 2.0

logger = logging.getLogger(__name__)


class BucketLock:
    """Holds a folder of a bucket until `release`; see `DiskLock`."""

    def __init__(self, folder: AnyPath, verb: str):
        self._folder, self._verb = folder, verb
        self._bucket, self._token = Bucket(folder), uuid.uuid4().hex
        content = self._content()
        owner = content and read_owner(content)
        if owner:
            require_ended(folder, owner, verb, self._owner)
            self._bucket.delete([LOCK_FILE])
        try:
            self._bucket.write(LOCK_FILE, self._record(0), new=True)
        except FileExistsError:
            raise refusal(folder, self._owner(), verb) from None
        if owner:
            time.sleep(SETTLE_SECONDS)
        if not self._is_mine():
            raise refusal(folder, self._owner(), verb)

    def show(self, beat: int) -> None:
        """Writes a heartbeat, unless another process has taken the folder."""
        with suppress(OSError):
            if self._is_mine():
                self._bucket.write(LOCK_FILE, self._record(beat))

    def require_held(self) -> None:
        """Raises LockedError if another process has taken the folder.

        It may after a time without heartbeats of this one.
        """
        content = self._content() or b""
        if self._token.encode() not in content:
            # The content just read: this process may write once more before it notices.
            raise refusal(self._folder, read_owner(content), self._verb)

    def release(self) -> None:
        """Releases the folder."""
        with suppress(OSError):
            if self._is_mine():
                self._bucket.delete([LOCK_FILE])

    def _record(self, beat: int) -> bytes:
        owner = Owner(socket.gethostname(), os.getpid(), beat)
        return json.dumps(owner._asdict() | {"token": self._token}).encode()

    def _is_mine(self) -> bool:
        return self._token.encode() in (self._content() or b"")

    def _owner(self) -> Owner | None:
        content = self._content()
        return read_owner(content) if content else None

    def _content(self) -> bytes | None:
        try:
            return self._bucket.read(LOCK_FILE)
        except FileNotFoundError:
            return None
