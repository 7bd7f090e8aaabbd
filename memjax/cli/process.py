"""A command's own process: signals, the other hosts, compiled programs."""

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import jax

from memjax.cli.entry import several_hosts
from memjax.data.documents.tokens import default_cache_dir
from memjax.training.config import EXIT_PREEMPTED
from memjax.training.distributed.multihost import catchable

#: How errors of the runtime begin, and how a save fails that waits for another host.
STATUS = re.compile(
    r"\b(UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED|"
    r"FAILED_PRECONDITION): |barrier"
)


@contextmanager
def exits_75() -> Iterator[None]:
    """A signal ends the command with exit code 75: before the first step, say.

    There is nothing to save then. A training loop handles the signals for its time.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        print(f"memjax: {name}; run the same command again", file=sys.stderr)
        raise SystemExit(EXIT_PREEMPTED)

    before = {number: signal.signal(number, stop) for number in catchable()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def join_cluster(distributed: str) -> None:
    """Initialises jax.distributed before the first JAX computation."""
    # Joining a cluster waits for its other hosts, so only where there are some.
    if distributed == "on" or (distributed == "auto" and several_hosts()):
        jax.distributed.initialize(heartbeat_timeout_seconds=heartbeat_seconds())


def leave_cluster(code: int) -> None:
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
    """After which a host that gives no sign is lost: MEMJAX_HEARTBEAT_SECONDS, or 60.

    Raises:
        ValueError: it is no whole number of at least 5.
    """
    text = os.environ.get("MEMJAX_HEARTBEAT_SECONDS", "60")
    if not text.isdecimal() or int(text) < 5:
        raise ValueError(f"MEMJAX_HEARTBEAT_SECONDS must be 5 or more, got {text!r}")
    return int(text)


@contextmanager
def waits_for_verdict() -> Iterator[None]:
    """An error of JAX's runtime may be the first sign of a lost host: waits for it.

    JAX's service ends this process then. The error goes on where it does not.
    """
    try:
        yield
    except (ValueError, OSError, jax.errors.JaxRuntimeError) as error:
        if jax.process_count() > 1 and STATUS.search(str(error)):
            time.sleep(2 * heartbeat_seconds())
        raise


def keep_programs(where: str | None = None) -> None:
    """Keeps what is compiled on the disk, for the next command.

    Args:
        where: a folder, or "off". None is that of JAX_COMPILATION_CACHE_DIR, or else
            `compiled` in the user's cache folder.
    """
    if where == "off":
        jax.config.update("jax_enable_compilation_cache", False)
    elif where is not None:
        folder = Path(where).expanduser().resolve()
        jax.config.update("jax_compilation_cache_dir", str(folder))
    elif not jax.config.values["jax_compilation_cache_dir"]:
        folder = default_cache_dir() / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(folder))
