"""Interleaved timing: one step of each implementation after the other, repeatedly.

Each implementation has a process of its own, and only one of them works at a time. So
a change in the machine's load hits all of them alike.

Memory that a step frees goes back to the kernel, which clears its pages again at the
next step. So all processes either have large pages, 512 times fewer, or keep what they
free (`PAGES`, settings of glibc 2.35).
"""

import importlib.util
import multiprocessing
import os
import pathlib
import resource
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
# Name of a ratio, which time of the torch baseline it divides, by which of ours.
RATIOS = (("speedup", "median_s", "median_s"), ("least_speedup", "min_s", "max_s"))
# The torch baselines: the authors' own programs.
TORCH_BASELINES = ("official", "official_fused")


def confine(threads: int) -> None:
    """Keeps this process to so many cores; XLA takes a thread for each."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def serve(
    line: Any, threads: int, make: Callable[..., Callable[[], Any]], given: Any
) -> None:
    """One implementation's process: a step for each True received, until a False."""
    confine(threads)
    step = make(*given)
    while line.recv():
        begin = time.perf_counter()
        value = step()
        seconds = time.perf_counter() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        line.send((seconds, value, peak))


def interleaved_timing(
    make: Callable[..., Callable[[], Any]],
    arguments: dict[str, tuple[Any, ...]],
    threads: int,
    repeats: int,
    pages: Pages,
) -> dict[str, list[tuple[float, Any, float]]]:
    """Times steps of all implementations, one of each in every round.

    Args:
        make: builds an implementation's step, in that implementation's process.
        arguments: for each implementation, the arguments of `make`.
        threads: of each process.
        repeats: rounds after the first, in which programs compile.
        pages: of the memory of each process.

    Returns:
        For each implementation and round, the first included: seconds, what the step
        returned, and the peak memory of the process so far in MiB.
    """
    spawn = multiprocessing.get_context("spawn")
    lines, processes = {}, []
    # The C library reads it when a process begins; all that begin from here on have it.
    os.environ.update(PAGES[pages])
    for name, given in arguments.items():
        lines[name], other = spawn.Pipe()
        target = (other, threads, make, given)
        # One that dies must not leave the others waiting for ever.
        processes.append(spawn.Process(target=serve, args=target, daemon=True))
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


def available(names: Sequence[str], official: pathlib.Path | None) -> list[Any]:
    """The implementations that can be timed: torch baselines need their checkout.

    Args:
        names: all that are requested.
        official: checkout of the authors' program, or None.
    """
    return [n for n in names if official is not None or n not in TORCH_BASELINES]


def require_official(official: pathlib.Path | None, file: str) -> None:
    """Checks that the authors' program can run, if it is requested.

    Args:
        official: checkout of the authors' program, or None.
        file: a file of that program, relative to the checkout.

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
