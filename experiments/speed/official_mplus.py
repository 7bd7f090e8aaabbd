"""Speed of injecting into and reading M+, against the program of its authors.

    python -m experiments.speed.official_mplus --official MemoryLLM

All implementations compute in float32 with the same number of threads, each in a
process of its own, timed interleaved; compilation and the first round are left out.
Weights and the initial memory are random, which does not change the time.

- `rounds`: 16 chunks of 512 tokens are injected, then a sequence of 256 is read, with
  pool and store full, for three sizes.
- `search`: one layer's search of 150,000 store rows, and fetching the best of them.

The peer is https://github.com/wangyu-ustc/MemoryLLM, cloned to the folder that
`--official` names, with its requirements (transformers 4.48.2, peft 0.10.0, PyTorch),
with its own attention and with PyTorch's fused one. Both, on a CPU, return fewer values
than its layers unpack; the missing ones are filled with None, nothing else is changed.
In a full store ours overwrites the oldest rows; the authors' program drops a batch of
rows when it merges. Without `--official` ours is timed alone.
"""

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import tyro

from experiments.lab.results import (
    RESULTS,
    Rows,
    number,
    settings,
    show,
    table,
    times,
    write_report,
)
from experiments.lab.timing import (
    PAGES,
    Pages,
    check_threads,
    require_checkout,
    speedups,
    summary,
    time_processes,
    versions,
)
from experiments.speed.official_mplus_programs import FILE, Memory, authors, ours
from experiments.speed.shapes import SHAPES, Shape, Size
from memjax.checks import check_sizes

Implementation = Literal["official", "official_fused", "ours"]
Part = Literal["rounds", "search"]
#: Chunks that are injected in a round, and tokens of a read or of a search.
CHUNKS, PROMPT = 16, 256
#: The attention that the authors' program runs with.
ATTENTION = {"official": "eager", "official_fused": "sdpa"}


#: Of the rounds, and of the search.
MEMORIES = (Memory(), Memory(pool=2_560), Memory(store=38_400))
SEARCHED = Memory(pool=256, store=150_000)


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the comparison.

    Attributes:
        size: of the backbone: "tiny", or "smollm2" (135M).
        implementations: "ours", "official" and "official_fused".
        official: checkout of the authors' program; None leaves both of those out.
        threads: of every implementation.
        repeats: timed rounds, at least 1.
        pages: of every implementation's memory: "large", or "kept" when it is freed.
        output: where .json goes, without the ending.
    """

    size: Size = "tiny"
    implementations: tuple[Implementation, ...] = get_args(Implementation)
    official: Path | None = None
    threads: int = 2
    repeats: int = 5
    pages: Pages = "large"
    output: Path = RESULTS / "speed" / "official_mplus"

    def __post_init__(self) -> None:
        check_sizes(repeats=self.repeats)
        require_checkout(self.official, FILE)
        check_threads(self.threads)


def make(
    implementation: Implementation,
    part: Part,
    shape: Shape,
    memory: Memory,
    checkout: Path | None = None,
) -> Callable[[], dict[str, float]]:
    """A round of an implementation, which returns the seconds of each act in it."""
    if implementation == "ours":
        subject = ours(shape, memory, memory.store)
    else:
        # The rows dropped since the last merge wait next to the store.
        dropped = memory.merge_every * memory.tokens if part == "rounds" else 0
        attention, held = ATTENTION[implementation], memory.store - dropped
        assert checkout is not None
        subject = authors(checkout, attention, shape, memory, held)
    random = np.random.default_rng(1)
    text = random.integers(0, shape.vocab, (1, CHUNKS * memory.chunk), np.int32)
    question = random.integers(0, shape.vocab, (1, PROMPT), np.int32)
    queries = random.standard_normal((PROMPT, memory.key_dim), np.float32)
    acts: dict[str, tuple[Callable[[np.ndarray], Any], np.ndarray]] = {
        "inject": (subject.inject, text),
        "read": (subject.read, question),
        "search": (subject.search, queries),
    }
    names = ("inject", "read") if part == "rounds" else ("search",)

    def timed() -> dict[str, float]:
        seconds = {}
        for name in names:
            act, given = acts[name]
            begin = time.perf_counter()
            act(given)
            seconds[name] = time.perf_counter() - begin
        return seconds

    return timed


def time_part(
    config: Config, part: Part, shape: Shape, memory: Memory
) -> dict[str, Any]:
    """For each implementation its acts, with tokens a second and speedups of ours."""
    load = os.getloadavg()[0]
    arguments = {
        name: (name, part, shape, memory, config.official)
        for name in config.implementations
        if name == "ours" or config.official is not None
    }
    rounds = time_processes(
        make, arguments, config.threads, config.repeats, config.pages
    )
    counts = {"inject": CHUNKS * memory.chunk, "read": PROMPT, "search": PROMPT}
    found: dict[str, dict[str, Any]] = {}
    for name, steps in rounds.items():
        found[name] = {"peak_mebibytes": steps[-1].peak_mebibytes}
        for act in steps[0].value:
            row = summary([step.value[act] for step in steps[1:]])
            row["tokens_per_s"] = counts[act] / row["median_s"]
            found[name][act] = row
    peers = {name: row for name, row in found.items() if name != "ours"}
    for act, row in found.get("ours", {}).items():
        if act in counts:
            row |= speedups(row, {name: peer[act] for name, peer in peers.items()})
    about = {"memory": memory._asdict(), "load_average_before": load}
    return about | {"implementations": found}


def main(config: Config) -> None:
    """Times, prints and writes the results."""
    report: dict[str, Any] = {"rounds": []}
    for memory in MEMORIES:
        row = time_part(config, "rounds", SHAPES[config.size], memory)
        report["rounds"].append(row)
        cells = {
            name: [found[act]["median_s"] for act in ("inject", "read")]
            for name, found in row["implementations"].items()
        }
        show(f"pool {memory.pool}, store {memory.store}", ("inject, s", "read"), cells)
    # One layer as wide as the real model's.
    layer = SHAPES["smollm2"]._replace(layers=1, vocab=256)
    report["search"] = time_part(config, "search", layer, SEARCHED)
    report["packages"] = versions("torch", "transformers", "peft")
    changed = {
        "official": config.official is not None,
        "environment": PAGES[config.pages],
    }
    question = "speed of injecting into and reading M+"
    write_report(config.output, question, settings(config) | changed, report)


PEERS = {
    "official": "the authors' program",
    "official_fused": "the same, with PyTorch's fused attention",
}


@table("mplus/speed", "speed/official_mplus")
def official_mplus(result: dict[str, Any]) -> Rows:
    """Seconds of injecting, reading and searching, with speedups of ours."""
    parts = [
        (
            "{1}, pool {0[pool]:,}, store {0[store]:,}".format(row["memory"], act),
            row,
            act,
        )
        for row in result["rounds"]
        for act in ("inject", "read")
    ]
    parts.append(("one layer's search", result["search"], "search"))
    for label, row, act in parts:
        found = row["implementations"]
        if act != "search":
            label += f", store {row['memory']['store']:,}"
        ours = found["ours"][act]
        cells = {"seconds": label, "memjax": number(ours["median_s"], 3)}
        for name, words in PEERS.items():
            cells[words] = number(found[name][act]["median_s"], 3)
            cells[f"speedup over {words}"] = times(ours["speedup"][name])
        yield cells


if __name__ == "__main__":
    main(tyro.cli(Config))
