"""Tables of cycles that were counted for TPUs."""

from collections.abc import Sequence
from typing import Any

from experiments.common.results import RESULTS
from experiments.tables.table import (
    Table,
    Tables,
    load,
    number,
    percent,
    thousands,
    times,
)

_SOURCE = "ops/tpu_cycles"
#: Cases of the ops stand in one table, those with another unit of work in others.
_UNIT = "token and head"


def _rows() -> dict[str, dict[str, Any]]:
    return load(_SOURCE)["cases"]


def _commits(cases: Sequence[dict[str, Any]]) -> list[str]:
    """The commits that the cases were counted at, below the table."""
    found = dict.fromkeys(case["commit"] for case in cases if case["commit"])
    return [f"counted at {', '.join(found)}"] if found else []


def ops() -> Table:
    """Cycles of a token and head, by what they are for, beside the limit of memory."""
    kept = {name: case for name, case in _rows().items() if case["unit"] == _UNIT}
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
    return Table(header, rows, [_SOURCE], _commits(list(kept.values())))


def kernels() -> Table:
    """The schedule of every kernel that runs in a case."""
    found = _rows()
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
        if case["unit"] == _UNIT
        for kernel in case["kernel"]
    ]
    header = ["case", "kernel", "bundles a step", "steps", "spills", "fills"]
    return Table([*header, *_units(found)], rows, [_SOURCE])


def _units(cases: dict[str, dict[str, Any]]) -> list[str]:
    """The units of the core; v6e and v5p have those of v5e."""
    for case in cases.values():
        for kernel in case["kernel"]:
            return list(kernel["use"])
    return []


def programs() -> Table:
    """Whole layers, steps of decoding, the search and training steps."""
    kept = {name: case for name, case in _rows().items() if case["unit"] != _UNIT}
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
    return Table(header, rows, [_SOURCE], _commits(list(kept.values())))


def dearest() -> Table:
    """The dearest operations of the ops' cases with backward passes."""
    rows = [
        [name, _dearest(case)]
        for name, case in _rows().items()
        if case["unit"] == _UNIT and name.endswith("/both")
    ]
    return Table(["cycles per token and head", "dearest operations"], rows, [_SOURCE])


def _dearest(case: dict[str, Any], most: int = 4) -> str:
    """The dearest operations with their sources and cycles."""
    digits = 1 if case["cycles"] < 1000 else 0
    return "; ".join(
        f"{operation['source'].split('/')[-1] or 'no source'}"
        f" ({operation['operation']}) {number(operation['cycles'], digits)}"
        for operation in case["dearest"][:most]
    )


def _has(*units: str) -> bool:
    """Whether cases of these units have been counted."""
    if not (RESULTS / f"{_SOURCE}.json").is_file():
        return False
    return any((case["unit"] == _UNIT) == (_UNIT in units) for case in _rows().values())


TABLES: Tables = {
    f"ops/cycles_{function.__name__}": function
    for function, unit in (
        (ops, _UNIT),
        (kernels, _UNIT),
        (dearest, _UNIT),
        (programs, "token"),
    )
    if _has(unit)
}
