"""How fast is a training step of HMT, beside the program of its authors?

    python -m experiments.hmt.speed.benchmark --official HMT-pytorch

One step reads 4 segments of 256 new tokens. Its loss is on the last 256, its gradients
go back through all segments, and AdamW updates the parameters. All implementations
compute in float32 with the same number of threads. The torch baseline is the authors'
own program, from the checkout that `--official` names; `official.py` says what it
needs. Without it ours are timed alone. Timing is interleaved: each implementation has a
process of its own, and they make one step each, one at a time. Compilation and the
first step are not timed. Weights are random, which does not change the time.

The least possible time comes from this machine's peaks, which are measured first (one
matrix product and one copy). `share_of_peak` is the rate of the needed operations, as a
share of the peak rate. `times_roofline` is the time over the least possible time.
`speedup` is the baseline's median time over ours; `least_speedup` is its fastest step
over our slowest. The cost of long inputs is measured by `experiments.hmt.cost`.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import pathlib
from concurrent.futures import ProcessPoolExecutor
from typing import Any, get_args

import tyro
from rich.console import Console
from rich.table import Table

from experiments.common.interleaved_timing import (
    PAGES,
    RATIOS,
    TORCH_BASELINES,
    Pages,
    available,
    confine,
    interleaved_timing,
    require_official,
)
from experiments.hmt.speed import official
from experiments.hmt.speed.implementations import Implementation, build
from experiments.hmt.speed.operations import (
    SHAPES,
    Shape,
    Size,
    Trained,
    least_bytes,
    operations,
)
from experiments.lab.results import RESULTS, settings, write_report
from experiments.lab.timing import summary
from experiments.ops.benchmark import COPY, PRODUCT, this_device


@dataclasses.dataclass(frozen=True)
class Config:
    """What is timed.

    Attributes:
        sizes: of the backbone: "tiny", or "smollm2" (135M).
        batches: sequences of a step.
        trained: everything, or LoRA (rank 8) and the memory's parameters.
        implementations: "official", and ours keeping all activations or recomputing
            them.
        official: checkout of the authors' program; None leaves it out.
        threads: of every implementation.
        repeats: timed steps of each, at least 1.
        pages: of every implementation's memory: "large", or "kept" when it is freed.
        output: where .json goes, without the ending.
    """

    sizes: tuple[Size, ...] = ("tiny", "smollm2")
    batches: tuple[int, ...] = (1, 2)
    trained: tuple[Trained, ...] = ("all", "lora")
    implementations: tuple[Implementation, ...] = get_args(Implementation)
    official: pathlib.Path | None = None
    threads: int = 2
    repeats: int = 5
    pages: Pages = "large"
    output: pathlib.Path = RESULTS / "hmt" / "speed"

    def __post_init__(self) -> None:
        for name in ("sizes", "batches", "trained", "implementations"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        for name, value in (("repeats", self.repeats), ("batches", min(self.batches))):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        require_official(self.official, official.FILE)
        cores = len(os.sched_getaffinity(0))
        if not 1 <= self.threads <= cores:
            raise ValueError(f"threads must be in [1, {cores}], got {self.threads}")


def time_steps(
    config: Config, shape: Shape, batch: int, trained: Trained
) -> dict[str, Any]:
    """Seconds, loss and peak memory of one step of every implementation."""
    rest = (shape, batch, trained, config.threads, config.official)
    names = available(config.implementations, config.official)
    arguments = {name: (name, *rest) for name in names}
    found = interleaved_timing(
        build, arguments, config.threads, config.repeats, config.pages
    )
    return {
        name: summary([seconds for seconds, _, _ in rows[1:]])
        | {"first_s": rows[0][0], "loss": rows[-1][1], "peak_mebibytes": rows[-1][2]}
        for name, rows in found.items()
    }


def main(config: Config) -> None:
    """Times, prints and writes the results."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, confine, (config.threads,)) as pool:
        name, device = pool.submit(this_device, PRODUCT, COPY).result()
    rows = []
    for size in config.sizes:
        for trained in config.trained:
            for batch in config.batches:
                row = measure(config, size, batch, trained, device)
                rows.append(row)
                print(json.dumps(row), flush=True)
    changed = {
        "official": config.official is not None,
        "environment": PAGES[config.pages],
    }
    results = {
        "peaks": {"of": name} | device._asdict(),
        "packages": {
            package: importlib.metadata.version(package)
            for package in ("torch", "transformers", "peft")
            if importlib.util.find_spec(package) is not None
        },
        "steps": rows,
    }
    question = "speed of a training step of HMT"
    write_report(config.output, question, settings(config) | changed, results)
    _print(rows)


def measure(
    config: Config, size: Size, batch: int, trained: Trained, device: Any
) -> dict[str, Any]:
    """One row: times, speedups, operations and shares of the peak."""
    shape = SHAPES[size]
    flops = operations(shape, batch, trained)
    traffic = least_bytes(shape, trained)
    least = max(flops["needed"] / device.flops, traffic / device.bandwidth)
    load = os.getloadavg()[0]
    times = time_steps(config, shape, batch, trained)
    for name, row in times.items():
        row["share_of_peak"] = flops["needed"] / row["median_s"] / device.flops
        row["times_roofline"] = row["median_s"] / least
        if name in TORCH_BASELINES:
            continue
        baselines = {other: times[other] for other in TORCH_BASELINES if other in times}
        for key, of, by in RATIOS:
            row[key] = {other: took[of] / row[by] for other, took in baselines.items()}
    return {
        "size": size,
        "batch": batch,
        "trained": trained,
        "operations": flops,
        "bytes": traffic,
        "roofline_s": least,
        # Beside other work PyTorch's threads wait for each other, and lose far more.
        "load_average_before": load,
        "implementations": times,
    }


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table("backbone", "trained", "batch", "implementation", "seconds", "spread")
    for column in ("peak MiB", "of peak", "of roofline", "speedup"):
        table.add_column(column, justify="right")
    for row in rows:
        for name, found in row["implementations"].items():
            table.add_row(
                row["size"],
                row["trained"],
                str(row["batch"]),
                name,
                f"{found['median_s']:.3f}",
                f"{found['min_s']:.3f} to {found['max_s']:.3f}",
                f"{found['peak_mebibytes']:,.0f}",
                f"{found['share_of_peak']:.0%}",
                f"{found['times_roofline']:.1f}x",
                ", ".join(f"{x:.2f}" for x in found.get("speedup", {}).values()),
            )
    Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Config))
