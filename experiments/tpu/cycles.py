"""Cycles of our programs on a TPU, counted from the compiler's schedule without one.

    python -m experiments.tpu.cycles                          # what is not counted yet
    python -m experiments.tpu.cycles --only trellis/c64/both  # some, anew
    python -m experiments.tpu.cycles --list                   # names of the cases

libtpu compiles each case for one chip, in a process of its own, and writes the bundles
that it has scheduled. A bundle takes a cycle. Counted are the bundles of every
operation, by how often its loops run. Operations of XLA are a range, from their bundles
or the time of their bytes to the compiler's own estimate, if that is more. Of a
conditional the branch with the fewest cycles counts. Branches in kernels count as if
they always ran, except those that pass over blocks of causal attention, and the codes
of KDA and GDN-2 for chunks that forget little or much. Results are added to those of
the file, each with its commit; a single number was counted before there were ranges.

What this does not show: waiting of a kernel for memory, and launches.
"""

import tempfile
import time
import types
from collections.abc import Container
from pathlib import Path
from typing import Any

from experiments.lab import results
from experiments.lab.options import Output, folder, run
from experiments.tpu import cases_models, cases_ops
from experiments.tpu.case import Case
from experiments.tpu.compile import Sizes, compile_case, entry
from memjax.aot.chips import CHIPS
from memjax.aot.cycles.count import count, span
from memjax.checks import require_known
from memjax.evaluation.provenance import version

QUESTION = "cycles of programs compiled for a TPU"
MODULES = (cases_ops, cases_models)
CASES: dict[str, Case] = {
    name: case for module in MODULES for name, case in module.table().items()
}
OUTPUT = results.RESULTS / "tpu" / "cycles"


def chosen(only: tuple[str, ...], counted: Container[str]) -> list[str]:
    """The cases to count: those named, or all that are not counted."""
    if not only:
        return [name for name in CASES if name not in counted]
    found = []
    for part in only:
        named = [n for n in CASES if n == part or n.startswith(f"{part}/")]
        require_known("only", part, tuple(CASES) if not named else (part,))
        found += named
    return list(dict.fromkeys(found))


def count_case(
    name: str, keep: Path | None = None, sizes: Sizes | None = None
) -> dict[str, Any]:
    """Compiles and counts one case; its files stay in `keep`."""
    module = next(m for m in MODULES if name in m.table())
    with tempfile.TemporaryDirectory() as temporary:
        folder = (keep / name if keep else Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return count_in(folder, module, name, sizes)


def count_in(
    folder: Path, module: types.ModuleType, name: str, sizes: Sizes | None = None
) -> dict[str, Any]:
    """Compiles a case of a module into an empty folder, and counts it."""
    begin, case = time.perf_counter(), module.table()[name]
    facts = compile_case(module.__name__, name, folder, sizes or {})
    counted = count(folder, facts.shares, CHIPS[case.chip].bytes_per_cycle)
    seconds = round(time.perf_counter() - begin, 1)
    return entry(case, counted, facts) | version()._asdict() | {"seconds": seconds}


def main(
    only: tuple[str, ...] = (),
    list: bool = False,  # noqa: A002
    keep: Path | None = None,
    output: Output = OUTPUT,
) -> None:
    """Counts, and writes the file anew after every case.

    Args:
        only: names of cases, or their beginnings up to a slash, to count anew; all
            that have no result yet unless given.
        list: print the names of the cases, and count nothing.
        keep: a folder in which the program and the bundles of every case stay.
        output: where .json goes, without the ending.
    """
    if list and (keep, output) != (None, OUTPUT):
        raise ValueError(f"list must be alone, got keep={keep}, output={output}")
    if list:
        print("\n".join(chosen(only, ())))
        return
    if keep:
        folder("keep", keep)
    # Asked before anything is compiled: files may change while it goes on.
    version()
    file = Path(f"{output}.json")
    counted = results.read_object(file, "cases")["cases"] if file.exists() else {}
    for name in chosen(only, counted):
        try:
            row = counted[name] = count_case(name, keep)
        except RuntimeError as error:
            print(error, flush=True)
            continue
        # Cases of earlier programs stay, behind the others.
        order = dict.fromkeys((*CASES, *counted))
        ordered = {name: counted[name] for name in order if name in counted}
        results.write_report(output, QUESTION, {"only": only}, {"cases": ordered})
        ranges = ("cycles", "kernels", "copies", "times_limit")
        cells = {column: span(*row[column], digits=2) for column in ranges}
        results.show(name, iter([{f"per {row['unit']}": ""} | cells]))


SUMMARY = {
    "linear attention": "linear_attention",
    "SSD (Mamba-2)": "ssd",
    "Gated DeltaNet": "gated_delta_rule",
    "16 key, 32 value heads of 128, 1 x 8,192": "gated_delta_rule/qwen3.5",
    "GLA": "gla",
    "GLA behind the product of its logits, gates by XLA": "gla/gates_outside",
    "the same, gates by the kernels": "gla/gates_inside",
    "KDA": "kda",
    "KDA, 16 key, 32 value heads of 128, 1 x 8,192": "kda/qwen3.5",
    "the same behind the product of its logits, gates by XLA": "kda/gates_outside",
    "and gates by the kernels": "kda/gates_inside",
    "KDA, chunks that forget much": "kda_strong",
    "GDN-2": "gdn2",
    "GDN-2, chunks that forget much": "gdn2_strong",
    "GSA": "gated_slots",
    "Lattice, chunks of 64": "lattice-dec/c64",
    "Lattice, chunks of 16": "lattice-dec/c16",
    "Trellis, chunks of 64": "trellis/c64",
    "Trellis, chunks of 16": "trellis/c16",
    "TTT, mini-batches of 16": "ttt_linear/c16",
    "causal attention at 2,048 tokens": "attention/d64/t2048",
    "at 8,192": "attention/d64/t8192",
    "at 16,384": "attention/d64/t16384",
    "the same by splash, jax's kernel, at 2,048": "splash/d64/t2048",
    "by splash at 8,192": "splash/d64/t8192",
    "by splash at 16,384": "splash/d64/t16384",
}


def cycles_of(case: dict[str, Any], digits: int) -> str:
    """The cycles of an entry, as a range where its ends differ."""
    if isinstance(case["cycles"], float):
        return f"{results.number(case['cycles'], digits)} (estimate)"
    return span(*case["cycles"], digits=digits)


def notes(cases: dict[str, dict[str, Any]]) -> results.Rows:
    """Of a table: commits, and loops that the compiler does not know the length of."""
    commits = dict.fromkeys(case["commit"] for case in cases.values())
    yield f"counted at {', '.join(filter(None, commits))}"
    for name, case in cases.items():
        if loops := case["unknown_loops"]:
            yield f"{name}: a run finds the loops of {', '.join(loops)}, counted once"


@results.table("ops/cycles_summary", "tpu/cycles")
def cycles_summary(result: dict[str, Any]) -> results.Rows:
    """Cycles of the ops and of causal attention, on one chip."""
    cases, shown = result["cases"], {}
    for name, case in SUMMARY.items():
        names = [f"{case}/{which}" for which in ("forward", "both", "xla/both")]
        found = {name: cases[name] for name in names if name in cases}
        shown |= found
        forward, both, *plain = found.values()
        yield {
            "cycles a token and head on a v5e": name,
            "forward": cycles_of(forward, 1),
            "with backward": cycles_of(both, 1),
            "the same without a kernel": "".join(cycles_of(x, 1) for x in plain),
            "least for the memory's traffic": results.number(both["memory_cycles"], 1),
        }
    yield from notes(shown)


STEPS = {
    "rows of 2,048 tokens": "t2048",
    "the same, layers written out, activations kept": "t2048/unrolled",
    "rows of 8,192": "t8192",
    "rows of 32,768": "t32768",
}


@results.table("ops/training", "tpu/cycles")
def cycles_training(result: dict[str, Any]) -> results.Rows:
    """Whole updates of models of 125M parameters on one chip."""
    shown = {}
    for name in cases_models.TRAINED:
        cells = {"cycles a token (share of the matrix unit's peak)": name}
        for words, step in STEPS.items():
            cells[words] = "not counted"
            if case := result["cases"].get(f"train/{name}/{step}"):
                shown[f"{name}/{step}"] = case
                share = case["flop_utilisation"]
                low, high = (share,) * 2 if isinstance(share, float) else share
                share = span(100 * low, 100 * high)
                cells[words] = f"{cycles_of(case, 0)} ({share}%)"
        yield cells
    yield from notes(shown)


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


@results.table("ops/decoding", "tpu/cycles")
def cycles_decoding(result: dict[str, Any]) -> results.Rows:
    """A token of a layer in decoding, and the limit of memory."""
    shown = {name: result["cases"][f"decode/{x}"] for name, x in DECODED.items()}
    for name, case in shown.items():
        yield {
            "cycles a token of a layer": name,
            "scheduled": cycles_of(case, 0),
            "least for the memory's traffic": results.number(case["memory_cycles"], 0),
        }
    yield from notes(shown)


if __name__ == "__main__":
    run(main)
