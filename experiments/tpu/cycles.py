"""Cycles of our programs on a TPU, counted from the compiler's schedule without one.

    python -m experiments.tpu.cycles                          # what is not counted yet
    python -m experiments.tpu.cycles --only trellis/c64/both  # some, anew
    python -m experiments.tpu.cycles --list                   # names of the cases

libtpu compiles each case for one chip, in a process of its own, and writes the bundles
that it has scheduled. A bundle takes a cycle. Counted are the bundles of every
operation, by how often its loops run; for operations of XLA the compiler's own estimate
where that is more, which includes their traffic with memory. Of a conditional the
branch with the fewest cycles counts. Branches in kernels count as if they always ran,
except those that pass over blocks of causal attention. Results are added to those of
the file, each with the commit it was counted at.

What this does not show: waiting of a kernel for memory, and launches. Counted cycles
are a lower bound of the time, and a scale between two programs.
"""

import dataclasses
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import tyro

from experiments.lab.results import (
    RESULTS,
    Rows,
    figure,
    number,
    percent,
    settings,
    show,
    table,
    times,
    write_report,
)
from experiments.tpu import cases_memories, cases_models, cases_ops
from experiments.tpu.case import Case
from experiments.tpu.cases_ops import SHAPE
from experiments.tpu.compile import compile_case, entry
from memjax.aot.cycles.count import count
from memjax.checks import require_known
from memjax.evaluation.drawing import drawing, log_ticks, log_values, source_of
from memjax.evaluation.provenance import version

QUESTION = "cycles of programs compiled for a TPU"
MODULES = (cases_ops, cases_memories, cases_models)
CASES: dict[str, Case] = {
    name: case for module in MODULES for name, case in module.table().items()
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Choice of cases.

    Attributes:
        only: names of cases, or their beginnings up to a slash, to count anew; all
            that have no result yet unless given.
        list: print the names of the cases, and count nothing.
        keep: a folder in which the program and the bundles of every case stay.
        output: where .json and .png go, without the ending.
    """

    only: tuple[str, ...] = ()
    list: bool = False
    keep: Path | None = None
    output: Path = RESULTS / "tpu" / "cycles"

    def __post_init__(self) -> None:
        beginnings = {n[: m.start()] for n in CASES for m in re.finditer("/", n)}
        for name in self.only:
            require_known("only", name, (*CASES, *sorted(beginnings)))


def chosen(config: Config, counted: dict[str, Any]) -> list[str]:
    """The cases to count, in the order in which they are named, or of the table."""
    if not config.only:
        return [name for name in CASES if name not in counted]
    named = (
        name
        for part in config.only
        for name in CASES
        if name == part or name.startswith(f"{part}/")
    )
    return list(dict.fromkeys(named))


def count_case(name: str, keep: Path | None = None) -> dict[str, Any]:
    """Compiles and counts one case.

    Args:
        name: of the case.
        keep: a folder for the program and its bundles; they are deleted unless given.

    Raises:
        RuntimeError: it does not compile.
    """
    begin, case = time.perf_counter(), CASES[name]
    module = next(m.__name__ for m in MODULES if name in m.table())
    with tempfile.TemporaryDirectory() as temporary:
        folder = (keep / name if keep else Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        facts = compile_case(module, name, folder)
        counted = count(folder, facts.shares, case.peaks.bytes_per_cycle)
        found = entry(case, counted, facts)
    seconds = round(time.perf_counter() - begin, 1)
    return found | version()._asdict() | {"seconds": seconds}


def main(config: Config) -> None:
    """Counts, and writes the file anew after every case."""
    if config.list:
        print("\n".join(CASES))
        return
    # Asked before anything is compiled: files may change while it goes on.
    version()
    file = Path(f"{config.output}.json")
    counted = json.loads(file.read_text())["cases"] if file.exists() else {}
    for name in chosen(config, counted):
        try:
            counted[name] = count_case(name, config.keep)
        except RuntimeError as error:
            print(error, flush=True)
            continue
        ordered = {name: counted[name] for name in CASES if name in counted}
        found = {"cases": ordered}
        result = write_report(config.output, QUESTION, settings(config), found)
        plot(result, Path(f"{config.output}.png"))
        row = counted[name]
        columns = ("cycles", "kernels", "copies", "memory_cycles", "times_limit")
        show(f"per {row['unit']}", columns, {name: [row[c] for c in columns]})


#: Lines of the plot, by the beginning of their cases' names.
LINES = {
    "trellis/c64": "Trellis",
    "lattice-dec/c64": "Lattice",
    "attention/d64": "causal attention, heads of 64",
    "splash/d64": "splash attention, heads of 64",
    "splash/d128": "splash attention, heads of 128",
}


def points(cases: dict[str, Any], beginning: str) -> list[tuple[int, float, float]]:
    """Length, cycles and the least by memory, forward with backward, by length."""
    found = []
    for name, case in cases.items():
        if match := re.fullmatch(rf"{beginning}(?:/t(\d+))?/both", name):
            length = int(match[1] or SHAPE.time)
            found.append((length, case["cycles"], case["memory_cycles"]))
    return sorted(found)


@figure("tpu/cycles")
def plot(result: dict[str, Any], path: Path) -> None:
    """Cycles per token and head against T, forward with backward, on a v5e."""
    found = {name: points(result["cases"], part) for part, name in LINES.items()}
    lines = {name: [*zip(*line, strict=True)] for name, line in found.items() if line}
    if not lines:
        return
    title = "Cycles per token and head, forward and backward, v5e"
    with drawing(path, title=title, source=source_of(result)) as drawn:
        axes = drawn.grid[0, 0]
        for i, (name, (lengths, cycles, least)) in enumerate(lines.items()):
            drawn.line(axes, lengths, cycles, name, i)
            name = f"least by memory: {name}"
            drawn.line(axes, lengths, least, name, i, linestyle=":", marker="")
        log_values(axes)
        axes.set(xlabel="tokens T", ylabel="cycles")
        log_ticks(axes, [n for lengths, *_ in lines.values() for n in lengths])


SUMMARY = {
    "linear attention": "linear_attention",
    "SSD (Mamba-2)": "ssd",
    "Gated DeltaNet": "gated_delta_rule",
    "GLA": "gla",
    "GSA": "gated_slots",
    "Lattice, chunks of 64": "lattice-dec/c64",
    "Lattice, chunks of 16": "lattice-dec/c16",
    "Lattice, single tokens": "lattice-dec/c1",
    "Trellis, chunks of 64": "trellis/c64",
    "Trellis, chunks of 16": "trellis/c16",
    "Trellis, chunks of 4": "trellis/c4",
    "Trellis, single tokens": "trellis/c1",
    "bounds of Trellis's steps, of each pass": "overlap/c16",
    "causal attention at 2,048 tokens": "attention/d64/t2048",
    "at 8,192": "attention/d64/t8192",
    "at 16,384": "attention/d64/t16384",
    "the same by splash, jax's kernel, at 2,048": "splash/d64/t2048",
    "by splash at 8,192": "splash/d64/t8192",
    "by splash at 16,384": "splash/d64/t16384",
}


@table("ops/cycles_summary", "tpu/cycles")
def cycles_summary(result: dict[str, Any]) -> Rows:
    """Cycles of the ops and of causal attention, on one chip."""
    cases = result["cases"]
    for name, case in SUMMARY.items():
        forward, both = (cases[f"{case}/{which}"] for which in ("forward", "both"))
        plain = cases.get(f"{case}/xla/both", {}).get("cycles")
        yield {
            "cycles a token and head on a v5e": name,
            "forward": number(forward["cycles"], 1),
            "with backward": number(both["cycles"], 1),
            "the same without a kernel": number(plain, 1),
            "least for the memory's traffic": number(both["memory_cycles"], 1),
        }


@table("ops/cycles_ops", "tpu/cycles")
def cycles_ops(result: dict[str, Any]) -> Rows:
    """Cycles of a token and head by purpose, and the limit of memory."""
    commits = {}
    for name, case in result["cases"].items():
        if case["unit"] != "token and head":
            continue
        commits[case["commit"]] = None
        yield {
            "per token and head": name,
            "cycles": number(case["cycles"], 1),
            "in kernels": number(case["kernels"], 1),
            "in copies": number(case["copies"], 1),
            "in the rest": number(case["other"], 1),
            "ns": number(case["ns"], 2),
            "least ns by memory": number(case["memory_ns"], 2),
            "times the limit": times(case["times_limit"]),
            "temporary MiB": number(case["temporary_bytes"] / 2**20, 0),
        }
    yield _counted_at(commits)


@table("ops/cycles_programs", "tpu/cycles")
def cycles_programs(result: dict[str, Any]) -> Rows:
    """Whole layers, steps of decoding, the search and training steps."""
    commits = {}
    for name, case in result["cases"].items():
        if case["unit"] == "token and head":
            continue
        commits[case["commit"]] = None
        peak = percent(case["flop_utilisation"]) if case["flops"] else ""
        yield {
            "program": name,
            "unit": case["unit"],
            "cycles a unit": number(case["cycles"], 0),
            "in kernels": number(case["kernels"], 0),
            "in copies": number(case["copies"], 0),
            "more in the dearest branches": number(case["dearest_branches"], 0),
            "times the limit": times(case["times_limit"]),
            "of the matrix unit's peak": peak,
            "temporary MiB": number(case["temporary_bytes"] / 2**20, 0),
        }
    yield _counted_at(commits)


def _counted_at(commits: dict[str, None]) -> str:
    return f"counted at {', '.join(filter(None, commits))}"


TRAINED = ("transformer", "elastic", "gated_deltanet", "lattice", "trellis")
STEPS = {
    "rows of 2,048 tokens": "t2048",
    "the same, layers written out, activations kept": "t2048/unrolled",
    "rows of 8,192": "t8192",
    "rows of 32,768": "t32768",
}


@table("ops/training", "tpu/cycles")
def cycles_training(result: dict[str, Any]) -> Rows:
    """Whole updates of models of 125M parameters on one chip."""
    commits = {}
    for name in TRAINED:
        name = f"{name}-{'100m' if name == 'elastic' else '125m'}"
        cells = {"cycles a token (share of the matrix unit's peak)": name}
        for words, step in STEPS.items():
            cells[words] = "not counted"
            if case := result["cases"].get(f"train/{name}/{step}"):
                commits[case["commit"]] = None
                share = percent(case["flop_utilisation"])
                cells[words] = f"{number(case['cycles'], 0)} ({share})"
        yield cells
    yield _counted_at(commits)


DECODED = {
    "attention to 2,048 tokens": "attention",
    "a sliding window of 2,048": "sliding_window",
    "Elastic Memory, blocks of 2,048": "elastic_memory",
    "Lattice": "lattice",
    "Trellis": "trellis",
    "Gated DeltaNet": "gated_deltanet",
    "Mamba-2": "mamba2",
    "GLA": "gla",
    "GSA": "gsa",
    "TTT": "ttt_linear",
}


@table("ops/decoding", "tpu/cycles")
def cycles_decoding(result: dict[str, Any]) -> Rows:
    """A token of a layer in decoding, and the limit of memory."""
    commits = {}
    for name, case in DECODED.items():
        found = result["cases"][f"decode/{case}"]
        commits[found["commit"]] = None
        yield {
            "cycles a token of a layer": name,
            "scheduled": number(found["cycles"], 0),
            "least for the memory's traffic": number(found["memory_cycles"], 0),
        }
    yield _counted_at(commits)


if __name__ == "__main__":
    main(tyro.cli(Config))
