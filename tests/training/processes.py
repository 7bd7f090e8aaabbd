"""Programs in processes of their own, forked from one that has imported everything.

Importing jax, orbax and memjax takes five seconds, a fork does not. What is killed or
sent a signal is a whole process all the same, whose jax starts after the fork: on as
many devices as its environment says.
"""

import functools
import multiprocessing
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import jax

from memjax import status
from tests import light
from tests.training import toy_run

Program = Callable[..., int | None]


class Process:
    """A program that has started; stdout and stderr are read together, line by line.

    Args:
        program: a function of a module; what it returns is the exit code.
        args: its arguments.
        environment: changes of the environment.
    """

    def __init__(
        self, program: Program, *args: Any, environment: Mapping[str, str] | None = None
    ):
        context = _context()
        reader, writer = context.Pipe(duplex=False)
        given = (program, args, dict(environment or {}), writer)
        self._process = context.Process(target=_main, args=given)
        # Compiling for a TPU makes a process ignore hang-ups, of which Python knows
        # nothing, and those that it starts then do so too.
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGHUP))
        self._process.start()
        # Else the end of the output would never come.
        writer.close()
        self.output = open(os.dup(reader.fileno()), errors="replace")
        reader.close()

    @property
    def pid(self) -> int:
        """Its number."""
        assert self._process.pid is not None
        return self._process.pid

    def lines(self) -> Iterator[str]:
        """The lines that it writes, until it ends."""
        return iter(self.output.readline, "")

    def read_until(self, text: str) -> str:
        """What it writes up to the line with `text`."""
        seen = ""
        for line in self.lines():
            seen += line
            if text in line:
                return seen
        raise AssertionError(f"ended without saying {text!r}:\n{seen}")

    def ended(self) -> bool:
        """Whether it has."""
        return not self._process.is_alive()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, which it must not ignore."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        [ignored] = re.findall(r"SigIgn:\s*(\w+)", status)
        assert not int(ignored, 16) >> (number - 1) & 1, status
        os.kill(self.pid, number)

    def finish(self) -> tuple[int | None, str]:
        """Waits for the end: the exit code, and what was not read of the output."""
        left = ""
        if not self.output.closed:
            with self.output:
                left = self.output.read()
        self._process.join(timeout=120)
        return self._process.exitcode, left

    def require_end(self, expected: int = 0) -> str:
        """Waits for the end with this exit code: what was not read of the output."""
        code, output = self.finish()
        assert code == expected, output
        return output


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def pod(
    program: Program,
    run_dir: Path,
    options: dict[str, Any],
    count: int,
    environment: Mapping[str, str] | None = None,
) -> list[Process]:
    """Several processes of one run that have started."""
    common = options | {"processes": count, "port": free_port()}
    return [
        Process(program, run_dir, common | {"process": n}, environment=environment)
        for n in range(count)
    ]


def toy(run_dir: Path, options: dict[str, Any]) -> Process:
    """A toy run that has started."""
    return Process(toy_program, run_dir, options)


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # TensorBoard's writer imports torch where it is installed.
    context.set_forkserver_preload(["memjax.training.pretrain", "tensorboardX"])
    return context


def _main(
    program: Program, args: Any, environment: dict[str, str], output: Connection
) -> None:
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output.fileno(), stream.fileno())
    output.close()
    os.environ.update(environment)
    light.lighten()
    # Tests wait for the line of a step.
    status.PAUSE = 0.0
    code = program(*args)
    # An interpreter that ends writes what it has not yet, and fails where it cannot.
    sys.stdout.flush()
    sys.exit(code)


def toy_program(run_dir: Path, options: dict[str, Any]) -> int:
    """A toy run; returns its exit code."""
    code = toy_run.main(run_dir, options)
    if options.get("processes"):
        # A fork ends without what is registered for a program's exit.
        jax.distributed.shutdown()
    return code
