"""Tables of `experiments.ops.tpu_cycles`."""

from collections.abc import Sequence
from typing import Any

from experiments.tables.table import (
    NotMeasured,
    Table,
    Tables,
    load,
    number,
    percent,
    thousands,
    times,
)

_CYCLES = "ops/tpu_cycles"
#: Cases of the ops stand in one table, those with another unit of work in others.
_UNIT = "token and head"


def _cases(of_ops: bool) -> dict[str, dict[str, Any]]:
    """The cases of the ops, or those with another unit of work.

    Raises:
        NotMeasured: none has been counted yet.
    """
    cases = load(_CYCLES)["cases"].items()
    found = {name: case for name, case in cases if (case["unit"] == _UNIT) == of_ops}
    if not found:
        raise NotMeasured(_CYCLES)
    return found


def _commits(cases: Sequence[dict[str, Any]]) -> list[str]:
    """The commits that the cases were counted at, below the table."""
    found = dict.fromkeys(case["commit"] for case in cases if case["commit"])
    return [f"counted at {', '.join(found)}"] if found else []


def cycles_ops() -> Table:
    """Cycles of a token and head, by what they are for, beside the limit of memory."""
    kept = _cases(of_ops=True)
    rows = [
        [
            name,
            number(case["cycles"], 1),
            number(case["kernels"], 1),
            number(case["copies"], 1),
            number(case["other"], 1),
            number(case["ns"], 2),
            number(case["memory_ns"], 2),
            times(case["times_limit"]),
            number(case["temporary_bytes"] / 2**20, 0),
        ]
        for name, case in kept.items()
    ]
    header = ["per token and head", "cycles", "in kernels", "in copies", "in the rest"]
    header += ["ns", "least ns by memory", "times the limit", "temporary MiB"]
    return Table(header, rows, [_CYCLES], _commits(list(kept.values())))


def cycles_kernels() -> Table:
    """The schedule of every kernel that runs in a case."""
    found = _cases(of_ops=True)
    rows = [
        [
            name,
            kernel["name"].rstrip("0123456789.").strip("_"),
            thousands(kernel["bundles"]),
            thousands(kernel["steps"]),
            thousands(kernel["spills"]),
            thousands(kernel["fills"]),
            *(percent(kernel["use"][unit]) for unit in _units(found)),
        ]
        for name, case in found.items()
        for kernel in case["kernel"]
    ]
    header = ["case", "kernel", "bundles a step", "steps", "spills", "fills"]
    return Table([*header, *_units(found)], rows, [_CYCLES])


def _units(cases: dict[str, dict[str, Any]]) -> list[str]:
    """The units of the core; v6e and v5p have those of v5e."""
    for case in cases.values():
        for kernel in case["kernel"]:
            return list(kernel["use"])
    return []


def cycles_programs() -> Table:
    """Whole layers, steps of decoding, the search and training steps."""
    kept = _cases(of_ops=False)
    rows = [
        [
            name,
            case["unit"],
            number(case["cycles"], 0),
            number(case["kernels"], 0),
            number(case["copies"], 0),
            number(case["dearest_branches"], 0),
            times(case["times_limit"]),
            percent(case["flop_utilisation"]) if case["flops"] else "",
            number(case["temporary_bytes"] / 2**20, 0),
            _dearest(case),
        ]
        for name, case in kept.items()
    ]
    header = ["program", "unit", "cycles a unit", "in kernels", "in copies"]
    header += ["more in the dearest branches", "times the limit"]
    header += ["of the matrix unit's peak", "temporary MiB", "dearest operations"]
    return Table(header, rows, [_CYCLES], _commits(list(kept.values())))


def cycles_dearest() -> Table:
    """The dearest operations of the ops' cases with backward passes."""
    rows = [
        [name, _dearest(case)]
        for name, case in _cases(of_ops=True).items()
        if name.endswith("/both")
    ]
    return Table(["cycles per token and head", "dearest operations"], rows, [_CYCLES])


def _dearest(case: dict[str, Any], most: int = 4) -> str:
    """The dearest operations with their sources and cycles."""
    digits = 1 if case["cycles"] < 1000 else 0
    return "; ".join(
        f"{operation['source'].split('/')[-1] or 'no source'}"
        f" ({operation['operation']}) {number(operation['cycles'], digits)}"
        for operation in case["dearest"][:most]
    )


#: The rows of the summary: their names, and the cases that they are.
_SUMMARY = {
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


def summary() -> Table:
    """Cycles of the ops beside those of causal attention, on one chip."""
    cases = load(_CYCLES)["cases"]
    header = [
        "cycles a token and head on a v5e",
        "forward",
        "with backward",
        "the same without a kernel",
        "least for the memory's traffic",
    ]
    rows = []
    for name, case in _SUMMARY.items():
        forward, both = (cases[f"{case}/{which}"] for which in ("forward", "both"))
        plain = cases.get(f"{case}/xla/both", {}).get("cycles")
        cycles = (forward["cycles"], both["cycles"], plain, both["memory_cycles"])
        rows.append([name, *(number(value, 1) for value in cycles)])
    return Table(header, rows, [_CYCLES])


#: The presets of the table of training steps, and its columns: what is counted.
_TRAINED = (
    "transformer-125m",
    "elastic-100m",
    "gated_deltanet-125m",
    "lattice-125m",
    "trellis-125m",
)
_STEPS = {
    "rows of 2,048 tokens": "t2048",
    "the same, layers written out, activations kept": "t2048/unrolled",
    "rows of 8,192": "t8192",
    "rows of 32,768": "t32768",
}


def training() -> Table:
    """Whole updates of models of 125M parameters on one chip.

    Raises:
        NotMeasured: none has been counted yet.
    """
    cases = load(_CYCLES)["cases"]
    found = {
        name: [cases.get(f"train/{name}/{step}") for step in _STEPS.values()]
        for name in _TRAINED
    }
    counted = [case for row in found.values() for case in row if case]
    if not counted:
        raise NotMeasured(_CYCLES)
    header = ["cycles a token (share of the matrix unit's peak)", *_STEPS]
    cell = lambda case: (
        f"{number(case['cycles'], 0)} ({percent(case['flop_utilisation'])})"
        if case
        else "not counted"
    )
    rows = [[name, *map(cell, row)] for name, row in found.items()]
    return Table(header, rows, [_CYCLES], _commits(counted))


#: The rows of the table of decoding: their names, and the cases that they are.
_DECODED = {
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


def decoding() -> Table:
    """A token of a layer in decoding, beside the limit of memory."""
    cases = load(_CYCLES)["cases"]
    kept = {name: cases[f"decode/{case}"] for name, case in _DECODED.items()}
    header = [
        "cycles a token of a layer",
        "scheduled",
        "least for the memory's traffic",
    ]
    rows = [
        [name, number(case["cycles"], 0), number(case["memory_cycles"], 0)]
        for name, case in kept.items()
    ]
    return Table(header, rows, [_CYCLES], _commits(list(kept.values())))


TABLES: Tables = {
    "ops/decoding": decoding,
    "ops/training": training,
    "ops/cycles_summary": summary,
    "ops/cycles_ops": cycles_ops,
    "ops/cycles_kernels": cycles_kernels,
    "ops/cycles_dearest": cycles_dearest,
    "ops/cycles_programs": cycles_programs,
}
