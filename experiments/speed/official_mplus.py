"""Speed of injecting into and reading M+, against the program of its authors.

    python -m experiments.speed.official_mplus --official MemoryLLM

All implementations compute in float32 with the same number of threads, each in a
process of its own, timed interleaved; compilation and the first round are left out.
Weights and the initial memory are random, which does not change the time.

In a round 16 chunks of 512 tokens are injected, then a sequence of 256 is read, with
pool and store full, for three sizes.

The peer is https://github.com/wangyu-ustc/MemoryLLM, cloned to the folder that
`--official` names, with its requirements (transformers 4.48.2, peft 0.10.0, PyTorch),
with its own attention and with PyTorch's fused one. Both, on a CPU, return fewer values
than its layers unpack; the missing ones are filled with None, nothing else is changed.
In a full store ours overwrites the oldest rows; the authors' program drops a batch of
rows when it merges.
"""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from experiments.lab.results import (
    RESULTS,
    Rows,
    number,
    show,
    table,
    times,
    write_report,
)
from experiments.lab.timing import (
    PAGES,
    require_checkout,
    speedup,
    summary,
    time_processes,
    versions,
)
from experiments.speed.official_mplus_programs import FILE, Memory, authors, ours
from experiments.speed.shapes import SHAPES

#: Chunks that are injected in a round, and tokens of a read.
CHUNKS, PROMPT = 16, 256
THREADS, REPEATS, ACTS = 2, 5, ("inject", "read")
#: The attention that the authors' program runs with.
ATTENTION = {"official": "eager", "official_fused": "sdpa"}
MEMORIES = (Memory(), Memory(pool=2_560), Memory(store=38_400))


def make(
    implementation: str, memory: Memory, checkout: Path
) -> Callable[[], dict[str, float]]:
    """A round of an implementation, which returns the seconds of each act in it."""
    shape = SHAPES["tiny"]
    if implementation == "ours":
        subject = ours(shape, memory, memory.store)
    else:
        # The rows dropped since the last merge wait next to the store.
        held = memory.store - memory.merge_every * memory.tokens
        subject = authors(checkout, ATTENTION[implementation], shape, memory, held)
    random = np.random.default_rng(1)
    text = random.integers(0, shape.vocab, (1, CHUNKS * memory.chunk), np.int32)
    question = random.integers(0, shape.vocab, (1, PROMPT), np.int32)
    acts = {"inject": (subject.inject, text), "read": (subject.read, question)}

    def timed() -> dict[str, float]:
        seconds = {}
        for name, (act, given) in acts.items():
            begin = time.perf_counter()
            act(given)
            seconds[name] = time.perf_counter() - begin
        return seconds

    return timed


def measure(official: Path, memory: Memory) -> dict[str, Any]:
    """For each implementation its acts, with speedups of ours."""
    names = (*ATTENTION, "ours")
    arguments = {name: (name, memory, official) for name in names}
    rounds = time_processes(make, arguments, THREADS, REPEATS)
    found: dict[str, dict[str, Any]] = {}
    for name, steps in rounds.items():
        found[name] = {"peak_mebibytes": steps[-1].peak_mebibytes}
        for act in ACTS:
            found[name][act] = summary([step.value[act] for step in steps[1:]])
    for act in ACTS:
        row = found["ours"][act]
        row["speedup"] = speedup(row, {name: found[name][act] for name in ATTENTION})
    return {"memory": memory._asdict(), "implementations": found}


def main(official: Path) -> None:
    """Times, prints and writes the results.

    Args:
        official: checkout of the authors' program.
    """
    require_checkout(official, FILE)
    rows = []
    for memory in MEMORIES:
        row = measure(official, memory)
        rows.append(row)
        found = row["implementations"].items()
        cells = {name: [x[act]["median_s"] for act in ACTS] for name, x in found}
        show(f"pool {memory.pool}, store {memory.store}", ACTS, cells)
    packages = versions("torch", "transformers", "peft")
    question = "speed of injecting into and reading M+"
    used = {"threads": THREADS, "environment": PAGES["large"]}
    results = {"rounds": rows, "packages": packages}
    write_report(RESULTS / "speed" / "official_mplus", question, used, results)


PEERS = {
    "official": "the authors' program",
    "official_fused": "the same, with PyTorch's fused attention",
}


@table("mplus/speed", "speed/official_mplus")
def official_mplus(result: dict[str, Any]) -> Rows:
    """Seconds of injecting and reading, with speedups of ours."""
    for row, act in itertools.product(result["rounds"], ACTS):
        sizes, found = row["memory"], row["implementations"]
        ours = found["ours"][act]
        cells = {
            "seconds": f"{act}, pool {sizes['pool']:,}, store {sizes['store']:,}",
            "memjax": number(ours["median_s"], 3),
        }
        for name, words in PEERS.items():
            cells[words] = number(found[name][act]["median_s"], 3)
            cells[f"speedup over {words}"] = times(ours["speedup"][name])
        yield cells


if __name__ == "__main__":
    tyro.cli(main)
