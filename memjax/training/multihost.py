"""Several processes act as one: shared decisions, and a stop at one common step.

`StopSignals.should_stop()` is polled between training steps and between evaluation
batches. A signal handler only sets a flag, so a signal that arrives while the first
step compiles takes effect as soon as that step is done.

With several processes the signal may reach one of them only. JAX's preemption
service then sees it, and all processes agree on one poll at which each of them is
stops; for that every process must poll equally often.
"""

import hashlib
import json
import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from memjax.training.resume import as_json

logger = logging.getLogger(__name__)


def agreed(flag: bool) -> bool:
    """The flag of process 0, on every process."""
    if jax.process_count() == 1:
        return flag
    # Clocks and files differ between processes, and a collective needs all in one
    # branch.
    return bool(multihost_utils.broadcast_one_to_all(np.asarray(flag)))


def same_everywhere(data_state: Any) -> Any:
    """The position in the data, checked to be the same on every process.

    Raises:
        ValueError: it is not JSON, or differs between processes.
    """
    text = json.dumps(as_json({"data": data_state}, "data.get_state()"), sort_keys=True)
    if jax.process_count() > 1:
        # Digests have one size, as a gather across processes needs.
        mine = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
        found = np.asarray(multihost_utils.process_allgather(mine))
        if (found != found[:1]).any():
            raise ValueError(
                "data.get_state() must be the same on every process, so that any "
                f"number of them can resume; process {jax.process_index()} has {text}"
            )
    return data_state


class StopSignals:
    """While entered, SIGTERM and the first SIGINT make `should_stop()` true.

    A second SIGINT (Ctrl-C) raises KeyboardInterrupt as usual. In a thread other
    than the main one signals cannot be caught, and a warning says so.
    """

    def __init__(self) -> None:
        self._stop_requested = False
        self._polls = 0
        self._before: dict[signal.Signals, Any] = {}

    def should_stop(self) -> bool:
        """Whether to save and stop now; with several processes, called by all."""
        if jax.process_count() > 1 and not self._stop_requested:
            self._polls += 1
            self._stop_requested = multihost_utils.reached_preemption_sync_point(
                self._polls
            )
        return self._stop_requested

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            logger.warning("not in the main thread: SIGTERM will not save the state")
        elif jax.process_count() > 1:
            # JAX's preemption service handles SIGTERM; Ctrl-C is passed on to it, so
            # that all processes stop at the same step.
            self._catch(signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        else:
            self._catch(signal.SIGTERM, self._request_stop)
            self._catch(signal.SIGINT, self._request_stop)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number: signal.Signals, handler: Any) -> None:
        self._before[number] = signal.signal(number, handler)

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop_requested = True
        # The second Ctrl-C is for a run that does not reach its next step.
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
