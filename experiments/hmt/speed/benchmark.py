"""How fast is a training step of HMT, beside its authors' way of computing it?

    python -m experiments.hmt.speed.benchmark

One step: 4 segments of 256 new tokens, loss on the last 256, backward through all
segments, AdamW; float32, the same number of threads for all. The peer is eager PyTorch
over a Hugging Face model (`hmt_peer`), where both are installed; `--official FOLDER`
adds the authors' program itself (`hmt_official` tells what it needs). Each candidate
lives in a process of its own and takes its turns there, one at a time; what it compiles
and its first step are not timed. Weights are random: they do not change the time.

Also counted: the operations that the step needs, the operations that each program
executes, and the least time that this machine's peaks allow (one product and one copy,
measured first): `share_of_peak` is needed operations over time, over that peak, and
`times_roofline` the time over the least time. `speedup` is how many times as fast as
the others ours are, by medians; `least_speedup` is the other's fastest step over our
slowest. The cost of long inputs is `hmt_cost.py`.
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
    OTHERS,
    PAGES,
    RATIOS,
    Pages,
    confine,
    present,
    require_program,
    summary,
    take_turns,
)
from experiments.hmt.speed import official as hmt_official
from experiments.hmt.speed.implementations import Candidate, build
from experiments.hmt.speed.operations import (
    SHAPES,
    Shape,
    Size,
    Trained,
    least_bytes,
    operations,
)
from experiments.ops import benchmark as benchmark_kernels
from memjax.evaluation.provenance import provenance

RESULTS = pathlib.Path(__file__).parents[2] / "results" / "hmt"


@dataclasses.dataclass(frozen=True)
class Config:
    """What is timed.

    Attributes:
        sizes: of the backbone: "tiny", or "smollm2" (135M).
        batches: rows of a step.
        trained: everything, or LoRA (rank 8) and the memory's parameters.
        candidates: "peer", "official", and ours keeping all activations or recomputing
            them.
        official: folder of the authors' program; None leaves it out.
        threads: of every candidate.
        repeats: timed steps of each, at least 1.
        pages: of the memory of every candidate: "large", or "kept" when it is freed.
        output: where the numbers go.
    """

    sizes: tuple[Size, ...] = ("tiny", "smollm2")
    batches: tuple[int, ...] = (1, 2)
    trained: tuple[Trained, ...] = ("all", "lora")
    candidates: tuple[Candidate, ...] = get_args(Candidate)
    official: pathlib.Path | None = None
    threads: int = 2
    repeats: int = 5
    pages: Pages = "large"
    output: pathlib.Path = RESULTS / "hmt_speed.json"

    def __post_init__(self) -> None:
        for name in ("sizes", "batches", "trained", "candidates"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        for name, value in (("repeats", self.repeats), ("batches", min(self.batches))):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        require_program(self.official, hmt_official.FILE)
        cores = len(os.sched_getaffinity(0))
        if not 1 <= self.threads <= cores:
            raise ValueError(f"threads must be in [1, {cores}], got {self.threads}")


def race(config: Config, shape: Shape, batch: int, trained: Trained) -> dict[str, Any]:
    """Times one step of every candidate, in turns, after one that is not timed."""
    rest = (shape, batch, trained, config.threads, config.official)
    at_hand = present(config.candidates, config.official)
    given = {name: (name, *rest) for name in at_hand}
    found = take_turns(build, given, config.threads, config.repeats, config.pages)
    return {
        name: summary([seconds for seconds, _, _ in rows[1:]])
        | {"first_s": rows[0][0], "loss": rows[-1][1], "peak_mebibytes": rows[-1][2]}
        for name, rows in found.items()
    }


def main(config: Config) -> None:
    """Times, prints and writes the results."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, confine, (config.threads,)) as pool:
        name, device = pool.submit(benchmark_kernels.this_device).result()
    rows = []
    for size in config.sizes:
        for trained in config.trained:
            for batch in config.batches:
                row = measure(config, size, batch, trained, device)
                rows.append(row)
                print(json.dumps(row), flush=True)
    fields = dataclasses.asdict(config)
    del fields["output"]
    fields["official"] = config.official is not None
    fields["environment"] = PAGES[config.pages]
    report = provenance("speed of a training step of HMT", fields) | {
        "peaks": {"of": name} | device._asdict(),
        "packages": {
            package: importlib.metadata.version(package)
            for package in ("torch", "transformers", "peft")
            if importlib.util.find_spec(package) is not None
        },
        "steps": rows,
    }
    config.output.parent.mkdir(parents=True, exist_ok=True)
    config.output.write_text(json.dumps(report, indent=1) + "\n")
    _print(rows)


def measure(
    config: Config, size: Size, batch: int, trained: Trained, device: Any
) -> dict[str, Any]:
    """One row: times, ratios to the peer, operations and distance to the peaks."""
    shape = SHAPES[size]
    flops = operations(shape, batch, trained)
    traffic = least_bytes(shape, trained)
    least = max(flops["needed"] / device.flops, traffic / device.bandwidth)
    load = os.getloadavg()[0]
    times = race(config, shape, batch, trained)
    for name, row in times.items():
        row["share_of_peak"] = flops["needed"] / row["median_s"] / device.flops
        row["times_roofline"] = row["median_s"] / least
        if name in OTHERS:
            continue
        others = {other: times[other] for other in OTHERS if other in times}
        for key, of, by in RATIOS:
            row[key] = {other: took[of] / row[by] for other, took in others.items()}
    return {
        "size": size,
        "batch": batch,
        "trained": trained,
        "operations": flops,
        "bytes": traffic,
        "roofline_s": least,
        # Beside other work PyTorch's threads wait for each other, and lose far more.
        "load_average_before": load,
        "candidates": times,
    }


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table("backbone", "trained", "batch", "candidate", "seconds", "spread")
    for column in ("peak MiB", "of peak", "of roofline", "speedup"):
        table.add_column(column, justify="right")
    for row in rows:
        for name, found in row["candidates"].items():
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
