"""Interleaved timing: in every round one call of each implementation after the other.

A change in the machine's load hits all of them alike. `time_functions` works in this
process. Implementations that would disturb each other's memory or threads get a process
each (`time_processes`), and only one of these works at a time.
"""

import contextlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

#: Settings of glibc 2.35 for memory that a step frees, which otherwise goes back to the
#: kernel and is cleared again at the next step. "large" pages are quicker in a process
#: by itself; next to others it may wait for the kernel to make room. With "kept" it
#: never does, but all threads share one heap.
Pages = Literal["large", "kept"]
PAGES: dict[Pages, dict[str, str]] = {
    "large": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    "kept": {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
    },
}


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


def speedups(
    ours: Mapping[str, float], peers: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """How many times faster than each peer: by medians, and at least.

    Args:
        ours: a `summary`.
        peers: a `summary` each.

    Returns:
        `speedup`, the peer's median over ours; `least_speedup`, its fastest round over
        our slowest.
    """
    ratios = (("speedup", "median_s", "median_s"), ("least_speedup", "min_s", "max_s"))
    return {
        name: {peer: row[of] / ours[by] for peer, row in peers.items()}
        for name, of, by in ratios
    }


def time_functions(
    functions: Mapping[str, Callable[[], Any]], repeats: int
) -> dict[str, dict[str, Any]]:
    """Times functions in this process.

    In every round each is called twice and timed once: the first call waits until the
    memory that the function before it freed, perhaps gigabytes, is back at the kernel.

    Args:
        functions: by name; JAX arrays that they return are waited for.
        repeats: rounds, at least 1.

    Returns:
        The `summary` of each function, and `repeats`.
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
    pages: Pages = "large",
) -> dict[str, list[Round]]:
    """Times steps of implementations that have a process each.

    Args:
        make: builds an implementation's step, in that implementation's process.
        arguments: of `make`, for each implementation.
        threads: of each process.
        repeats: rounds after the first, in which programs compile.
        pages: of each process's memory.

    Returns:
        All rounds of each implementation, the first included.
    """
    spawn = multiprocessing.get_context("spawn")
    lines, processes = {}, []
    with _environment(PAGES[pages]):
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
    confine(threads)
    step = make(*given)
    while line.recv():
        begin = time.perf_counter()
        value = step()
        seconds = time.perf_counter() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        line.send((seconds, value, peak))


def confine(threads: int) -> None:
    """Restricts this process to so many cores; XLA takes a thread for each."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables, which the C library reads when a process begins."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def check_threads(threads: int) -> None:
    """Raises ValueError where this process may not use so many cores."""
    cores = len(os.sched_getaffinity(0))
    if not 1 <= threads <= cores:
        raise ValueError(f"threads must be in [1, {cores}], got {threads}")


def require_checkout(official: Path | None, file: str) -> None:
    """Checks that the authors' program can run, if it is requested.

    Args:
        official: checkout of the program, or None.
        file: a file of it.

    Raises:
        ValueError: the checkout lacks the file, or PyTorch is not installed.
    """
    if official is None:
        return
    if not (official / file).is_file():
        raise ValueError(f"official must be a folder with {file}, got {official}")
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"official={official} needs {package}: not installed")


def versions(*packages: str) -> dict[str, str]:
    """Versions of those packages that are installed."""
    return {
        name: importlib.metadata.version(name)
        for name in packages
        if importlib.util.find_spec(name) is not None
    }
