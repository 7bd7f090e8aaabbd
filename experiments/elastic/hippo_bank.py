"""How long does a HiPPO bank take to build?

    OPENBLAS_NUM_THREADS=1 python -m experiments.elastic.hippo_bank

The closed form against the recurrence multiplied out, one matrix exponential and
one triangular solve per token; both give the transition and the kernel of one
block in float64. Then the whole bank of the paper's 1x memory, and growth with the
order. Every time is a median over `repeats`, with the fastest and the slowest; the
cache of quadrature nodes is emptied before each. One BLAS thread: with two, on a
busy machine, the recurrence took up to 97 s and the ratio of 2,700 flattered us.
About 15 seconds.
"""

import dataclasses
import pathlib

import numpy as np
import tyro

from experiments.elastic import discretisations
from experiments.lab.results import RESULTS, settings, write_report
from experiments.lab.timing import time_functions
from memjax_kernels._src.hippo import bank


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that changes the result."""

    order: int = 128
    """Coefficients in the comparison."""
    block_length: int = 512
    """Tokens of the block in the comparison."""
    whole_order: int = 540
    """Coefficients of the whole bank: the paper's 1x memory."""
    whole_block_length: int = 2048
    """Tokens in a block of the whole bank."""
    whole_blocks: int = 16
    """Blocks of the whole bank."""
    growth: tuple[int, ...] = (135, 270, 540, 1080, 2160)
    """Orders at which one block of `whole_block_length` tokens is built."""
    repeats: int = 5
    """Timings of each, at least 1."""
    output: pathlib.Path = RESULTS / "elastic" / "hippo_bank"
    """Where .json goes, without the ending."""

    def __post_init__(self) -> None:
        """Refuses values that time nothing."""
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")
        if not self.growth:
            raise ValueError("growth must name at least one order, got ()")


def closed_form(order: int, start: int, stop: int) -> discretisations.Unrolled:
    """Builds one block by `bank`, from nothing."""
    bank._gauss_legendre.cache_clear()
    return discretisations.Unrolled(
        bank.transition(order, start / stop), bank.block_kernel(order, start, stop)
    )


def whole_bank(config: Config) -> bank.HippoBank:
    """Builds every block of the whole bank, from nothing."""
    bank._gauss_legendre.cache_clear()
    return bank.build_hippo_bank(
        config.whole_order, config.whole_block_length, config.whole_blocks
    )


def compare(config: Config) -> dict:
    """Times both ways for the second block of a stream, and their difference."""
    start, stop = config.block_length, 2 * config.block_length
    ways = {
        "closed_form": lambda: closed_form(config.order, start, stop),
        "recurrence": lambda: discretisations.unroll(config.order, start, stop),
    }
    differences = map(np.subtract, *(way() for way in ways.values()))
    times = time_functions(ways, config.repeats)
    fast, slow = times["closed_form"], times["recurrence"]
    return times | {
        "speedup": slow["median_s"] / fast["median_s"],
        "least_speedup": slow["min_s"] / fast["max_s"],
        "largest_difference": max(float(np.abs(d).max()) for d in differences),
    }


def grow(config: Config) -> list[dict]:
    """Times one block at each order."""
    start, stop = config.whole_block_length, 2 * config.whole_block_length
    ways = {n: lambda n=n: closed_form(n, start, stop) for n in config.growth}
    times = time_functions({str(n): way for n, way in ways.items()}, config.repeats)
    return [
        {"order": n, "bytes_of_whole_bank": _whole_bytes(config, n)} | times[str(n)]
        for n in config.growth
    ]


def main(config: Config) -> None:
    """Times, prints and writes the results."""
    compared = compare(config)
    times = time_functions({"whole": lambda: whole_bank(config)}, config.repeats)
    whole = times["whole"] | {"bytes": _whole_bytes(config, config.whole_order)}
    growth = grow(config)
    _print(config, compared, whole, growth)
    measured = {"compared": compared, "whole_bank": whole, "growth": growth}
    question = "time to build HiPPO banks in closed form and by recurrence"
    write_report(config.output, question, settings(config), measured)


def _print(config: Config, compared: dict, whole: dict, growth: list[dict]) -> None:
    print(f"one block, N={config.order}, L={config.block_length}")
    for name in ("closed_form", "recurrence"):
        print(f"  {name:12} {_spread(compared[name])}")
    print(
        f"  {compared['speedup']:.0f} times faster (at worst "
        f"{compared['least_speedup']:.0f}), largest difference "
        f"{compared['largest_difference']:.1e}"
    )
    print(
        f"whole bank, N={config.whole_order}, {config.whole_blocks} blocks of "
        f"{config.whole_block_length}: {_spread(whole)}, {whole['bytes'] / 1e6:.0f} MB"
    )
    print(f"one block of {config.whole_block_length} tokens")
    for row in growth:
        print(f"  N={row['order']:5} {_spread(row)}")


def _spread(times: dict) -> str:
    return f"{times['median_s']:.4f} s ({times['min_s']:.4f} to {times['max_s']:.4f})"


def _whole_bytes(config: Config, order: int) -> int:
    return bank.hippo_bank_bytes(order, config.whole_block_length, config.whole_blocks)


if __name__ == "__main__":
    main(tyro.cli(Config))
