"""Commands on several hosts: joining them, and the exit of a command among them."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from memjax.cli.hosts import several_hosts
from memjax.leaving import EXIT_PREEMPTED

#: Status codes that errors of JAX's runtime begin with; a save waits at a barrier.
STATUS = (
    "UNKNOWN: ",
    "UNAVAILABLE: ",
    "INTERNAL: ",
    "ABORTED: ",
    "CANCELLED: ",
    "DEADLINE_EXCEEDED: ",
    "FAILED_PRECONDITION: ",
    "barrier",
)


@contextmanager
def joined(distributed: str) -> Iterator[None]:
    """Joins the other hosts, for a command that trains.

    After an error of JAX's runtime, which may be the first sign of a lost host, JAX's
    service gets the time to end this process; otherwise the error is raised.

    Args:
        distributed: "on", "off", or "auto": where the environment names several hosts.
    """

    try:
        # Before the first JAX computation; joining waits for the other hosts.
        if distributed == "on" or (distributed == "auto" and several_hosts()):
            jax.distributed.initialize(heartbeat_timeout_seconds=heartbeat_seconds())
        yield
    except (ValueError, OSError, jax.errors.JaxRuntimeError) as error:
        several = jax.distributed.is_initialized() and jax.process_count() > 1
        if several and any(status in str(error) for status in STATUS):
            time.sleep(2 * heartbeat_seconds())
        raise


def leave(code: int) -> None:
    """Ends a process that failed, at once, where it had joined others.

    JAX would wait for them, and they for this one. They learn that it is gone.
    """
    if not jax.distributed.is_initialized() or code in (0, EXIT_PREEMPTED):
        return
    sys.stdout.flush()
    sys.stderr.flush()
    if jax.process_index() == 0:
        # The others end with it: those that fail alike say so first.
        time.sleep(5.0)
    os._exit(code)


def heartbeat_seconds() -> int:
    """Seconds without a sign until a host is lost: MEMJAX_HEARTBEAT_SECONDS, or 60.

    Raises:
        ValueError: it is no whole number of at least 5.
    """
    text = os.environ.get("MEMJAX_HEARTBEAT_SECONDS", "60")
    if not text.isdecimal() or int(text) < 5:
        raise ValueError(f"MEMJAX_HEARTBEAT_SECONDS must be 5 or more, got {text!r}")
    return int(text)
