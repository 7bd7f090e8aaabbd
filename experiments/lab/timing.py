"""Interleaved timing: in every round one call of each implementation after the other.

A change in the machine's load hits all of them alike. `time_functions` works in this
process. Implementations that would disturb each other's memory or threads get a process
each (`time_processes`), and only one of these works at a time.
"""

import importlib.metadata
import importlib.util
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax

#: A setting of glibc 2.35: memory that a step frees goes back to the kernel, and large
#: pages are quickly cleared again at the next step.
ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class Round(NamedTuple):
    """A timed step: its seconds, its result, and the process's peak memory so far."""

    seconds: float
    value: Any
    peak_mebibytes: float


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Median and spread of times."""
    return {
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
    }


def time_functions(
    functions: Mapping[str, Callable[[], Any]], repeats: int
) -> dict[str, dict[str, Any]]:
    """The `summary` of each function's times in this process, over rounds.

    Each is called twice and timed once: the first call waits until the memory that the
    function before it freed, perhaps gigabytes, is back at the kernel.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            jax.block_until_ready(function())
            begin = time.perf_counter()
            jax.block_until_ready(function())
            seconds[name].append(time.perf_counter() - begin)
    return {n: summary(values) | {"repeats": repeats} for n, values in seconds.items()}


def time_processes(
    make: Callable[..., Callable[[], Any]],
    arguments: Mapping[str, tuple[Any, ...]],
    threads: int,
    repeats: int,
) -> dict[str, list[Round]]:
    """All rounds of each implementation, the first, in which it compiles, included.

    `make` builds an implementation's step, in that implementation's process.
    """
    spawn = multiprocessing.get_context("spawn")
    lines, processes = {}, []
    # The C library reads these variables when a process begins.
    with mock.patch.dict(os.environ, ENVIRONMENT):
        for name, given in arguments.items():
            lines[name], other = spawn.Pipe()
            target = (other, threads, make, given)
            # Daemons: one that dies must not leave the others waiting for ever.
            processes.append(spawn.Process(target=_serve, args=target, daemon=True))
            processes[-1].start()
            other.close()
    found: dict[str, list[Round]] = {name: [] for name in lines}
    for _ in range(1 + repeats):
        for name, line in lines.items():
            line.send(True)
            found[name].append(Round(*line.recv()))
    for line in lines.values():
        line.send(False)
    for process in processes:
        process.join()
    return found


def _serve(line: Any, threads: int, make: Callable[..., Any], given: Any) -> None:
    """One implementation's process: a step for each True received, until a False."""
    # XLA takes a thread for each core.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    step = make(*given)
    while line.recv():
        begin = time.perf_counter()
        value = step()
        seconds = time.perf_counter() - begin
        # `resource` would count the parent's memory, which this process began with.
        (peak,) = re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
        line.send((seconds, value, int(peak) / 2**10))


def versions(*packages: str) -> dict[str, str]:
    """Versions of those packages that are installed."""
    return {
        name: importlib.metadata.version(name)
        for name in packages
        if importlib.util.find_spec(name) is not None
    }
