"""Asks a running program to stop: signals become a question it can put often.

`should_stop()` is polled between training steps and between evaluation batches.
A handler only sets a flag, so a signal that arrives while the first step compiles
is answered as soon as that step is done.

With several processes the signal may reach one of them only. JAX's preemption
service then sees it, and all processes agree on one poll at which each of them is
told to stop; for that every process must poll equally often.
"""

import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

#: Exit code of a run that a signal stopped after its state was saved: the
#: `EX_TEMPFAIL` of sysexits.h. Running the same command again continues it.
EXIT_PREEMPTED = 75

logger = logging.getLogger(__name__)


class StopSignals:
    """While entered, SIGTERM and the first SIGINT make `should_stop()` true.

    A second SIGINT (Ctrl-C) raises KeyboardInterrupt as usual. In a thread other
    than the main one signals cannot be caught, and a warning says so.
    """

    def __init__(self) -> None:
        self._asked = False
        self._polls = 0
        self._before: dict[signal.Signals, Any] = {}

    def should_stop(self) -> bool:
        """Whether to save and stop now; with several processes, called by all."""
        if jax.process_count() > 1 and not self._asked:
            self._polls += 1
            self._asked = multihost_utils.reached_preemption_sync_point(self._polls)
        return self._asked

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            logger.warning("not in the main thread: SIGTERM will not save the state")
        elif jax.process_count() > 1:
            # SIGTERM is the preemption service's own; Ctrl-C must go the same way.
            self._catch(signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        else:
            self._catch(signal.SIGTERM, self._ask)
            self._catch(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number: signal.Signals, handler: Any) -> None:
        self._before[number] = signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
