"""How many cycles would a TPU take for our programs? Counted; no TPU is needed.

    python -m experiments.ops.tpu_cycles                          # what is not counted
    python -m experiments.ops.tpu_cycles --only trellis/c64/both  # some, anew
    python -m experiments.ops.tpu_cycles --list                   # names of the cases

libtpu compiles each case of `cycles/cases.py` for one chip, in a process of its own,
and writes down the bundles that it has scheduled. A bundle takes a cycle. Counted are
the bundles of every operation, by how often its loops run; for operations of XLA the
compiler's own estimate where that is more, which holds their traffic with memory.

Not counted is when a kernel waits for memory, and what a launch takes: counted cycles
are a lower bound of the time, and a scale between two programs. Of a conditional the
branch with the fewest cycles counts. Branches in kernels count as if they always ran,
except those that pass over blocks of causal attention.

Results are added to those that the file has, each with the commit it was counted at.
"""

import dataclasses
import json
import pathlib
import tempfile
import time
from typing import Any

import tyro

from experiments.lab.results import RESULTS, settings, show, write_report
from experiments.ops.cycles.cases import CASES, module_of
from experiments.ops.cycles.compile import compile_case
from experiments.ops.cycles.plot import plot
from experiments.ops.cycles.report import entry
from memjax.aot.cycles.count import count
from memjax.checks import require_known
from memjax.evaluation.provenance import version

QUESTION = "cycles of programs compiled for a TPU"


@dataclasses.dataclass(frozen=True)
class Config:
    """Which cases are counted.

    Attributes:
        only: names of cases, or their beginnings up to a slash, to count anew; all
            that have no result yet unless given.
        list: print the names of the cases, and count nothing.
        keep: a folder in which the program and the bundles of every case stay.
        output: where .json and .png go, without the ending.
    """

    only: tuple[str, ...] = ()
    list: bool = False
    keep: pathlib.Path | None = None
    output: pathlib.Path = RESULTS / "ops" / "tpu_cycles"

    def __post_init__(self) -> None:
        """Refuses names of no case."""
        for name in self.only:
            require_known("only", name, (*CASES, *_beginnings()))


def _beginnings() -> list[str]:
    """Of names of cases: all before any of their slashes."""
    cut = lambda name: (name[:i] for i, letter in enumerate(name) if letter == "/")
    return sorted({beginning for name in CASES for beginning in cut(name)})


def chosen(config: Config, counted: dict[str, Any]) -> list[str]:
    """The cases to count, in the order in which they are named, or of the table."""
    if not config.only:
        return [name for name in CASES if name not in counted]
    named = lambda part: [x for x in CASES if x == part or x.startswith(f"{part}/")]
    return list(dict.fromkeys(name for part in config.only for name in named(part)))


def count_case(name: str, keep: pathlib.Path | None = None) -> dict[str, Any]:
    """Compiles and counts one case.

    Args:
        name: of the case.
        keep: a folder for the program and its bundles; they are deleted unless given.

    Raises:
        RuntimeError: it does not compile.
    """
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (keep / name if keep else pathlib.Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        facts = compile_case(module_of(name), name, folder)
        case = CASES[name]
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
    file = pathlib.Path(f"{config.output}.json")
    counted = json.loads(file.read_text())["cases"] if file.exists() else {}
    for name in chosen(config, counted):
        try:
            counted[name] = count_case(name, config.keep)
        except RuntimeError as error:
            print(error, flush=True)
            continue
        ordered = {name: counted[name] for name in CASES if name in counted}
        result = write_report(
            config.output, QUESTION, settings(config), {"cases": ordered}
        )
        plot(result, pathlib.Path(f"{config.output}.png"))
        row = counted[name]
        columns = ("cycles", "kernels", "copies", "memory_cycles", "times_limit")
        show(f"per {row['unit']}", columns, {name: [row[c] for c in columns]})


if __name__ == "__main__":
    main(tyro.cli(Config))
