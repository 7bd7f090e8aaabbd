"""Names a step that does not end, with its host."""

import logging
import socket
import threading
import time

import jax

logger = logging.getLogger(__name__)


class Watchdog:
    """Says once, in one line, what a step has waited for too long.

    Too long is longer than `minutes`, and than twice the longest wait before. The line
    comes from every host that waits: the one whose data stopped says so, the others say
    that they wait for the devices.

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
        """From now on, `step` waits for `what`."""
        self._begin((time.monotonic(), step, what))

    def rests(self) -> None:
        """Nothing is waited for that has a usual time: a compilation, a save."""
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
