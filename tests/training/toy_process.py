"""`toy_run` in a process of its own, forked from one that has imported everything.

Importing jax, orbax and memjax takes five seconds, a fork does not. What is killed or
sent a signal is a whole process all the same, whose jax starts after the fork.
"""

import functools
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import jax

from tests.training import toy_run


class ToyProcess:
    """A run that has started; stdout and stderr are read together, line by line."""

    def __init__(self, run_dir: Path, options: dict[str, Any]):
        context = _context()
        reader, writer = context.Pipe(duplex=False)
        self._process = context.Process(target=_main, args=(run_dir, options, writer))
        self._process.start()
        # Else the end of the output would never come.
        writer.close()
        self._output = open(os.dup(reader.fileno()), errors="replace")
        reader.close()

    def lines(self) -> Iterator[str]:
        """The lines that it writes, until it ends."""
        return iter(self._output.readline, "")

    def ended(self) -> bool:
        """Whether it has."""
        return not self._process.is_alive()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def finish(self) -> tuple[int | None, str]:
        """Waits for the end: the exit code, and what was not read of the output."""
        with self._output:
            left = self._output.read()
        self._process.join(timeout=120)
        return self._process.exitcode, left


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["memjax.training.loop"])
    return context


def _main(run_dir: Path, options: dict[str, Any], output: Connection) -> None:
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output.fileno(), stream.fileno())
    output.close()
    code = toy_run.main(run_dir, options)
    if options.get("processes"):
        # A fork ends without what is registered for a program's exit.
        jax.distributed.shutdown()
    sys.exit(code)
