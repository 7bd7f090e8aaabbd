"""Tables of speed: generation, the ops' benchmark, and cycles counted for TPUs."""

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

NAMES = {
    "memjax": "memjax",
    "transformers": "transformers",
    "transformers_compiled": "transformers, compiled",
}
_CYCLES = "ops/tpu_cycles"
#: Cases of the ops stand in one table, those with another unit of work in others.
_UNIT = "token and head"


def speed() -> Table:
    """Every implementation at every batch size and number of cores."""
    rows = []
    for found in load("generation/speed")["rows"]:
        ours = found["implementations"]["memjax"]
        for name, row in found["implementations"].items():
            whole = row["whole"]
            rows.append(
                [
                    f"{found['cores']}",
                    f"{found['batch']}",
                    NAMES[name],
                    number(row["tokens_per_s"], 1),
                    f"{whole['min_s']:.2f} to {whole['max_s']:.2f}",
                    number(1e3 * row["first"]["median_s"], 0),
                    number(row["peak_mebibytes"], 0),
                    times(ours["whole_speedup"].get(name)),
                    percent(row["equal_tokens"]),
                ]
            )
    header = [
        "cores",
        "prompts",
        "program",
        "tokens/s",
        "s, fastest to slowest",
        "first token: ms",
    ]
    header += ["peak MiB", "memjax is faster by", "tokens as transformers'"]
    return Table(header, rows, ["generation/speed"])


def streaming() -> Table:
    """Memory of the process while a long text is read."""
    report = load("generation/streaming")
    every = report["config"]["every"]
    rows = []
    for name, row in report["models"].items():
        resident = row["resident_mebibytes"]
        picked = [resident[0], resident[len(resident) // 2], resident[-1]]
        rows.append(
            [
                {"hmt": "HMT", "mplus": "M+"}[name],
                *(number(x, 0) for x in picked),
                percent(row["growth"]),
                number(row["state_bytes"] / 2**20, 0),
                number(row["tokens_per_s"], 0),
            ]
        )
    count = len(report["models"]["hmt"]["resident_mebibytes"])
    at = [1, count // 2 + 1, count]
    header = ["resident MiB after", *(f"{every * n:,} tokens" for n in at)]
    header += ["growth", "state MiB", "tokens/s"]
    return Table(header, rows, ["generation/streaming"])


def kernels() -> Table:
    """The chunked form beside the token loop, forward and backward."""
    found: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    for row in load("ops/kernels")["shapes"]:
        key = row["implementation"], row["pass"]
        found.setdefault(row["op"], {})[key] = row
    rows = []
    for op, by in found.items():
        cells = []
        for direction in ("forward", "both"):
            loop, fast = by.get(("reference", direction)), by["xla", direction]
            speedup = loop["median_s"] / fast["median_s"] if loop else None
            slow = number(1e3 * loop["median_s"], 1) if loop else ""
            cells += [slow, number(1e3 * fast["median_s"], 1), times(speedup)]
        rows.append([op, *cells, times(by["xla", "both"]["times_roofline"])])
    header = ["op", "loop, forward: ms", "chunks: ms", "speedup"]
    header += ["loop, with backward: ms", "chunks: ms", "speedup", "time over roofline"]
    return Table(header, rows, ["ops/kernels"])


def growth() -> Table:
    """Microseconds a token against length, forward with backward."""
    found = [row for row in load("ops/kernels")["growth"] if row["pass"] == "both"]
    lengths = sorted({row["time"] for row in found})
    cells = {(r["op"], r["time"]): number(1e6 / r["tokens_per_s"], 0) for r in found}
    ops = dict.fromkeys(row["op"] for row in found)
    rows = [[op, *(cells.get((op, n), "") for n in lengths)] for op in ops]
    header = ["µs a token", *(f"{n:,} tokens" for n in lengths)]
    return Table(header, rows, ["ops/kernels"])


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


TABLES: Tables = {
    "generation/speed": speed,
    "generation/streaming": streaming,
    "ops/kernels": kernels,
    "ops/growth": growth,
    "ops/cycles_ops": cycles_ops,
    "ops/cycles_kernels": cycles_kernels,
    "ops/cycles_dearest": cycles_dearest,
    "ops/cycles_programs": cycles_programs,
}
