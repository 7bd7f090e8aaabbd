"""Timing candidates side by side: each in its own process, a step of each in turns.

Memory that a step frees goes back to the kernel, which clears its pages again at the
next step. So all processes have either large pages, 512 times fewer, or keep what they
free (`PAGES`, settings of glibc 2.35).
"""

import importlib.util
import multiprocessing
import os
import pathlib
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

#: "large" is quicker in a process by itself. Between others it may wait for the kernel
#: to make room; "kept" never does, but all threads share one heap.
Pages = Literal["large", "kept"]
PAGES: dict[Pages, dict[str, str]] = {
    "large": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    "kept": {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
    },
}
# What is called so, of the other's time, by ours.
RATIOS = (("speedup", "median_s", "median_s"), ("least_speedup", "min_s", "max_s"))
# Candidates that need PyTorch and transformers.
OTHERS = ("peer", "official", "official_fused")


def confine(threads: int) -> None:
    """Keeps this process to so many cores; XLA takes a thread for each."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def serve(
    line: Any, threads: int, make: Callable[..., Callable[[], Any]], given: Any
) -> None:
    """A candidate's process: a step whenever it is asked, until it is told to stop."""
    confine(threads)
    step = make(*given)
    while line.recv():
        begin = time.perf_counter()
        value = step()
        seconds = time.perf_counter() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        line.send((seconds, value, peak))


def take_turns(
    make: Callable[..., Callable[[], Any]],
    given: dict[str, tuple[Any, ...]],
    threads: int,
    repeats: int,
    pages: Pages,
) -> dict[str, list[tuple[float, Any, float]]]:
    """Runs one step of every candidate, in turns, after one that is not counted.

    Args:
        make: builds a candidate's step, in the candidate's own process.
        given: what it is given, for each candidate.
        threads: of each process.
        repeats: steps after the first.
        pages: of the memory of each process.

    Returns:
        For each candidate and step, the first among them: seconds, what the step
        returned, and the most MiB that the process has had.
    """
    spawn = multiprocessing.get_context("spawn")
    lines, processes = {}, []
    # The C library reads it when a process begins; all that begin from here on have it.
    os.environ.update(PAGES[pages])
    for name, arguments in given.items():
        lines[name], other = spawn.Pipe()
        target = (other, threads, make, arguments)
        processes.append(spawn.Process(target=serve, args=target))
        processes[-1].start()
        other.close()
    found: dict[str, list[tuple[float, Any, float]]] = {name: [] for name in lines}
    for _ in range(1 + repeats):
        for name, line in lines.items():
            line.send(True)
            found[name].append(line.recv())
    for line in lines.values():
        line.send(False)
    for process in processes:
        process.join()
    return found


def present(candidates: Sequence[str], official: pathlib.Path | None) -> list[Any]:
    """The candidates that are at hand.

    Args:
        candidates: all that are asked for.
        official: folder of the authors' program, or None.
    """
    packages = ("torch", "transformers")
    installed = all(importlib.util.find_spec(name) is not None for name in packages)

    def here(name):
        known = official is not None or not name.startswith("official")
        return name not in OTHERS or (installed and known)

    return [name for name in candidates if here(name)]


def require_program(official: pathlib.Path | None, file: str) -> None:
    """Raises ValueError on a folder without the authors' program, `file` of it."""
    if official is not None and not (official / file).is_file():
        raise ValueError(f"official must be a folder with {file}, got {official}")


def summary(seconds: list[float]) -> dict[str, float]:
    """Median and spread of times."""
    return {
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
    }
