"""Agreement of several processes: shared decisions, and a stop at a common step.

`StopSignals.should_stop()` is polled between training steps and between evaluation
batches. Before the first step there is nothing to save: where `memjax.leaving` is in
force, a signal that arrives while that step compiles ends the program at once.

With several processes the signal may reach only one of them. JAX's preemption service
then makes all of them stop at the same poll, for which every process must poll equally
often.
"""

import hashlib
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from memjax.leaving import Exit, catchable
from memjax.training.resume import as_json, flatten

logger = logging.getLogger(__name__)


def agreed(flag: bool) -> bool:
    """The flag of process 0, on every process."""
    if jax.process_count() == 1:
        return flag
    # Clocks and files differ between processes, and a collective needs all in one
    # branch.
    return bool(multihost_utils.broadcast_one_to_all(np.asarray(flag)))


def same_everywhere(data_state: Any) -> Any:
    """The data position, checked to be equal on all processes.

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


#: Maximum number of fields in an error.
MOST_NAMED = 5


def require_same_configuration(record: Mapping[str, Any]) -> None:
    """Raises ValueError, on all processes, if their configurations differ.

    Args:
        record: of this process, as JSON; the message names differing fields.
    """
    if jax.process_count() == 1:
        return
    text = json.dumps(flatten(as_json(record, "config")), sort_keys=True)
    mine = np.frombuffer(text.encode(), np.uint8)
    lengths = np.asarray(multihost_utils.process_allgather(np.asarray(len(mine))))
    # A gather needs one size; spaces at the end are no part of JSON.
    padded = np.pad(mine, (0, int(lengths.max()) - len(mine)), constant_values=32)
    found = np.asarray(multihost_utils.process_allgather(padded))
    if (found == found[:1]).all():
        return
    records = [json.loads(row.tobytes()) for row in found]
    lines = [
        _difference(name, [r.get(name, "absent") for r in records])
        for name in sorted(set().union(*records))
        if any(r.get(name, "absent") != records[0].get(name, "absent") for r in records)
    ]
    if more := len(lines) - MOST_NAMED:
        lines = lines[:MOST_NAMED] + ([f"{more} more fields"] if more > 0 else [])
    raise ValueError(f"processes have different configurations: {'; '.join(lines)}")


def _difference(name: str, values: list[Any]) -> str:
    """The most common value of a field, and the processes with others."""
    shown = [json.dumps(value) for value in values]
    usual = max(shown, key=shown.count)
    others = [f"{v} on process {i}" for i, v in enumerate(shown) if v != usual]
    return f"{name} is {usual}, but {', '.join(others[:MOST_NAMED])}"


class StopSignals:
    """While entered, SIGTERM, SIGHUP, SIGUSR1 and Ctrl-C make `should_stop()` true.

    A second Ctrl-C raises KeyboardInterrupt, for a run that does not reach its next
    step, but not after `should_stop()` returned true nor inside `protected`. Outside of
    the main thread signals cannot be caught, which is warned of. Signals that end the
    program at once, `memjax.leaving`, go on to do so until `keep`.
    """

    def __init__(self) -> None:
        self._stop_requested = self._interrupted = self._protected = False
        self._polls = 0
        self._before: dict[signal.Signals, Any] = {}
        self._leaving: list[signal.Signals] = []

    def keep(self) -> None:
        """Called when there is something to save."""
        for number in self._leaving:
            self._catch(number, self._request_stop)
        self._leaving = []

    def should_stop(self) -> bool:
        """Whether to save and stop now; called by all processes."""
        if jax.process_count() > 1 and not self._stop_requested:
            self._polls += 1
            self._stop_requested = multihost_utils.reached_preemption_sync_point(
                self._polls
            )
        # From here on the state is being saved.
        self._protected |= self._stop_requested
        return self._stop_requested

    @contextmanager
    def protected(self) -> Iterator[None]:
        """A second Ctrl-C does not interrupt the `with` block."""
        before, self._protected = self._protected, True
        try:
            yield
        finally:
            self._protected = before

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            logger.warning("not in the main thread: no signal will save the state")
            return self
        several = jax.process_count() > 1
        for number in catchable():
            if not several and isinstance(signal.getsignal(number), Exit):
                self._leaving.append(number)
            elif not several:
                self._catch(number, self._request_stop)
            elif number != signal.SIGTERM:
                # JAX's preemption service handles SIGTERM; the others are passed on to
                # it, so that all processes stop at the same step.
                self._catch(number, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None is a handler that Python did not set and cannot set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _catch(self, number: signal.Signals, handler: Any) -> None:
        self._before[number] = signal.signal(number, handler)

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._interrupted and not self._protected:
            signal.default_int_handler(number, frame)
        self._interrupted |= number == signal.SIGINT
        self._stop_requested = True
