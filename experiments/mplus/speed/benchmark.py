"""How fast does M+ inject and read, beside the program of its authors?

    python -m experiments.mplus.speed.benchmark --official MemoryLLM

The torch baseline is the authors' own program, from the checkout that `--official`
names, with its own attention and with PyTorch's fused one; `official.py` says what it
needs. Without it ours is timed alone. All compute in float32 with the same number of
threads. Timing is interleaved: each implementation has a process of its own, and they
work one at a time. Compilation and the first round are not timed. Weights and the
initial memory are random, which does not change the time.

- `rounds`: 16 chunks of 512 tokens are injected, then a sequence of 256 is read, with
  pool and store full: seconds, tokens a second and peak memory, for several sizes.
- `growth`: seconds of every single inject into a store that is empty at first. Does an
  inject slow down as the store grows?
- `search`: one layer's search of 150,000 store rows, and fetching the best of them.

In a full store ours overwrites the oldest rows; the authors' program drops a batch of
rows when it merges. `speedup` is the baseline's median time over ours; `least_speedup`
is its fastest step over our slowest.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any, get_args

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from experiments.common.interleaved_timing import (
    PAGES,
    RATIOS,
    Pages,
    available,
    interleaved_timing,
    require_official,
)
from experiments.hmt.speed.operations import SHAPES, Shape, Size
from experiments.lab.results import RESULTS, settings, write_report
from experiments.lab.timing import summary
from experiments.mplus.speed import official
from experiments.mplus.speed.implementations import (
    Implementation,
    Memory,
    Part,
    make,
)


@dataclasses.dataclass(frozen=True)
class Config:
    """What is timed.

    Attributes:
        size: of the backbone: "tiny", or "smollm2" (135M).
        pools: memory tokens in the short-term pool, at least 256; each with the first
            store.
        stores: memory tokens in the long-term store; each with the first pool.
        retrieved: memory tokens that a read takes from the store.
        merge_every: updates between two merges of the torch baseline; the rows dropped
            in that time, 256 an update, and the retrieved must fit into every store.
        chunks: injected in a round.
        prompt: tokens that a read reads.
        injects: timed one by one; 0 leaves the part out. The store is empty at first.
        searched: memory tokens that the search scores; 0 leaves the part out.
        implementations: "ours", "official" and "official_fused".
        official: checkout of the authors' program; None leaves both of those out.
        threads: of every implementation.
        repeats: timed rounds, at least 1.
        pages: of every implementation's memory: "large", or "kept" when it is freed.
        output: where .json goes, without the ending.
    """

    size: Size = "tiny"
    pools: tuple[int, ...] = (10_240, 2_560)
    stores: tuple[int, ...] = (153_600, 38_400)
    retrieved: int = 2_560
    merge_every: int = 60
    chunks: int = 16
    prompt: int = 256
    injects: int = 130
    searched: int = 150_000
    implementations: tuple[Implementation, ...] = get_args(Implementation)
    official: pathlib.Path | None = None
    threads: int = 2
    repeats: int = 5
    pages: Pages = "large"
    output: pathlib.Path = RESULTS / "mplus" / "speed"

    def __post_init__(self) -> None:
        for name in ("pools", "stores", "implementations"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        for name in ("retrieved", "merge_every", "chunks", "prompt", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}"
                )
        for name in ("injects", "searched"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{name} must be at least 0, got {getattr(self, name)}"
                )
        least = self.retrieved + self.merge_every * Memory.tokens
        if min(self.stores) < least:
            raise ValueError(f"stores must be at least {least}, got {self.stores}")
        if 0 < self.searched < self.retrieved:
            raise ValueError(
                f"searched must be at least retrieved={self.retrieved}, "
                f"got {self.searched}"
            )
        require_official(self.official, official.FILE)
        cores = len(os.sched_getaffinity(0))
        if not 1 <= self.threads <= cores:
            raise ValueError(f"threads must be in [1, {cores}], got {self.threads}")

    @property
    def memories(self) -> list[Memory]:
        """Of the rounds: pools with the first store, then other stores."""
        sizes = [(pool, self.stores[0]) for pool in self.pools]
        sizes += [(self.pools[0], store) for store in self.stores[1:]]
        return [
            Memory(
                pool=pool,
                store=store,
                retrieved=self.retrieved,
                merge_every=self.merge_every,
            )
            for pool, store in sizes
        ]


def time_part(
    config: Config, part: Part, shape: Shape, memory: Memory, repeats: int
) -> dict[str, Any]:
    """For each implementation the seconds of every act, and its peak memory."""
    rest = (part, shape, memory, config.chunks, config.prompt, config.official)
    names = available(config.implementations, config.official)
    arguments = {name: (name, *rest) for name in names}
    found = interleaved_timing(make, arguments, config.threads, repeats, config.pages)
    result = {}
    for name, rows in found.items():
        acts = {act: [seconds[act] for _, seconds, _ in rows[1:]] for act in rows[0][1]}
        result[name] = {"seconds": acts, "peak_mebibytes": rows[-1][2]}
    return result


def rounds(config: Config, memory: Memory) -> dict[str, Any]:
    """Times, tokens a second and speedups of injecting and reading."""
    shape = SHAPES[config.size]
    load = os.getloadavg()[0]
    found = time_part(config, "rounds", shape, memory, config.repeats)
    counts = {"inject": config.chunks * memory.chunk, "read": config.prompt}
    for row in found.values():
        for act, seconds in row.pop("seconds").items():
            times = summary(seconds) | {"mean_s": float(np.mean(seconds))}
            row[act] = times | {"tokens_per_s": counts[act] / times["median_s"]}
    _compare(found, counts)
    return {
        "memory": dataclasses.asdict(memory),
        "store_bytes": 4 * shape.layers * memory.store * (shape.width + memory.key_dim),
        "pool_bytes": 4 * shape.layers * memory.pool * shape.width,
        "load_average_before": load,
        "implementations": found,
    }


def growth(config: Config, memory: Memory) -> dict[str, Any]:
    """Seconds of every inject into a store that is empty at first."""
    found = time_part(config, "growth", SHAPES[config.size], memory, config.injects)
    for row in found.values():
        seconds = row.pop("seconds")["inject"]
        tenth = max(1, len(seconds) // 10)
        ends = {"first": seconds[:tenth], "last": seconds[-tenth:]}
        row["inject_s"] = seconds
        row |= {f"{end}_tenth_s": float(np.median(part)) for end, part in ends.items()}
        row |= {"sum_s": sum(seconds), "max_s": max(seconds)}
    return {"memory": dataclasses.asdict(memory), "implementations": found}


def search(config: Config) -> dict[str, Any]:
    """Seconds of one layer's search, as wide as the real model's."""
    shape = dataclasses.replace(SHAPES["smollm2"], layers=1, vocab=256)
    memory = Memory(pool=256, store=config.searched, retrieved=config.retrieved)
    found = time_part(config, "search", shape, memory, config.repeats)
    for row in found.values():
        row["search"] = summary(row.pop("seconds")["search"])
    _compare(found, ("search",))
    return {"memory": dataclasses.asdict(memory), "implementations": found}


def _compare(found: dict[str, Any], acts: Iterable[str]) -> None:
    """Adds the speedups of ours over each torch baseline to the row of ours."""
    baselines = {name: row for name, row in found.items() if name != "ours"}
    if "ours" not in found or not baselines:
        return
    for act in acts:
        row, over = (
            found["ours"][act],
            {name: row[act] for name, row in baselines.items()},
        )
        for key, of, by in RATIOS:
            row[key] = {name: other[of] / row[by] for name, other in over.items()}


def main(config: Config) -> None:
    """Times, prints and writes the results."""
    changed = {
        "official": config.official is not None,
        "environment": PAGES[config.pages],
    }
    report: dict[str, Any] = {"rounds": []}
    for memory in config.memories:
        report["rounds"].append(rounds(config, memory))
        print(json.dumps(report["rounds"][-1]), flush=True)
    if config.injects:
        report["growth"] = growth(config, config.memories[0])
    if config.searched:
        report["search"] = search(config)
    packages = [
        name
        for name in ("torch", "transformers", "peft")
        if importlib.util.find_spec(name) is not None
    ]
    report["packages"] = {name: importlib.metadata.version(name) for name in packages}
    question = "speed of injecting into and reading M+"
    write_report(config.output, question, settings(config) | changed, report)
    _print(report)


def _print(report: dict[str, Any]) -> None:
    table = Table("pool", "store", "act", "implementation", "seconds", "spread")
    for column in ("tokens/s", "peak MiB", "times as slow as ours"):
        table.add_column(column, justify="right")
    timed = [(row, act) for row in report["rounds"] for act in ("inject", "read")]
    timed += [(report["search"], "search")] if "search" in report else []
    for row, act in timed:
        ratios = row["implementations"].get("ours", {act: {}})[act].get("speedup", {})
        for name, found in row["implementations"].items():
            times = found[act]
            table.add_row(
                f"{row['memory']['pool']:,}",
                f"{row['memory']['store']:,}",
                act,
                name,
                f"{times['median_s']:.3f}",
                f"{times['min_s']:.3f} to {times['max_s']:.3f}",
                f"{times['tokens_per_s']:,.0f}" if "tokens_per_s" in times else "",
                f"{found['peak_mebibytes']:,.0f}",
                f"{ratios[name]:.2f}" if name in ratios else "",
            )
    Console().print(table)
    for name, row in report.get("growth", {"implementations": {}})[
        "implementations"
    ].items():
        first, last = row["first_tenth_s"], row["last_tenth_s"]
        print(f"{name}: an inject {first:.4f} s at first, {last:.4f} s at last")


if __name__ == "__main__":
    main(tyro.cli(Config))
