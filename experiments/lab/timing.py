"""Interleaved timing of functions within one process.

Implementations whose memory or threads would disturb each other get a process each:
see `experiments/common/interleaved_timing.py`.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


def time_functions(
    functions: Mapping[str, Callable[[], Any]], repeats: int
) -> dict[str, dict[str, float]]:
    """Times the functions, one call of each in every round, interleaved.

    So a change in the machine's load hits all of them alike. In every round each is
    called twice and timed once: the first call waits until what the function before it
    kept, which may be gigabytes, has gone back to the kernel.

    Args:
        functions: by name; JAX arrays that they return are waited for.
        repeats: rounds, at least 1.

    Returns:
        For each function median, minimum and maximum in seconds, and the repeats.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            jax.block_until_ready(function())
            begin = time.perf_counter()
            jax.block_until_ready(function())
            seconds[name].append(time.perf_counter() - begin)
    return {n: summary(values) | {"repeats": repeats} for n, values in seconds.items()}


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Median and spread of times."""
    return {
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
    }
