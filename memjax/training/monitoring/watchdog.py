"""Watchdog: a warning about a step that does not end."""

import logging
import socket
import threading
import time

import jax

logger = logging.getLogger(__name__)


class Watchdog:
    """Warns once of a step that waits longer than `minutes` and twice any wait before.

    Every waiting host warns: the one without data of its batch, the others of the
    devices.

    Args:
        minutes: see `LoopConfig.watchdog_minutes`.
    """

    def __init__(self, minutes: float):
        self._limit = 60 * minutes
        self._lock = threading.Lock()
        self._wait: tuple[float, int, str] | None = None
        self._longest, self._said = 0.0, False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def waits(self, step: int, what: str) -> None:
        """Starts a wait of `step` for `what`."""
        self._begin((time.monotonic(), step, what))

    def rests(self) -> None:
        """Ends the wait, for a compilation or a save of unknown length."""
        self._begin(None)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _begin(self, wait: tuple[float, int, str] | None) -> None:
        with self._lock:
            if self._wait is not None:
                self._longest = max(self._longest, time.monotonic() - self._wait[0])
            self._wait, self._said = wait, False

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, self._limit / 4)):
            with self._lock:
                wait, limit = self._wait, max(self._limit, 2 * self._longest)
                if wait is None or self._said or time.monotonic() - wait[0] < limit:
                    continue
                self._said = True
            since, step, what = wait
            logger.warning(
                "process %d of %d on %s: step %d has waited for %s for %.1f minutes",
                jax.process_index(),
                jax.process_count(),
                socket.gethostname(),
                step,
                what,
                (time.monotonic() - since) / 60,
            )
