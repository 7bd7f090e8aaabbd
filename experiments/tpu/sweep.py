"""Cycles with other sizes of programs than those that the kernels have.

    python -m experiments.tpu.sweep                 # all that are not counted yet
    python -m experiments.tpu.sweep --only lattice  # those of some rows of the table

`memjax_kernels._src.common.packs.tuned` has a table of sizes. Each is changed alone, to
the neighbours named here, and cases that read it are counted as by `cycles`. Results
are added to those of the file. Counts of another table are counted again.

What this does not show: waiting for memory, which smaller programs do more of.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from experiments.lab import results
from experiments.lab.options import Output, among, run
from experiments.tpu.cycles import count_case
from memjax.evaluation.provenance import version
from memjax_kernels._src.common.packs import tuned

QUESTION = "cycles of kernels with other sizes of their programs"
OUTPUT = results.RESULTS / "tpu" / "sweep"


class Swept(NamedTuple):
    """Neighbours of the sizes of a row of the table, and cases that read it."""

    cases: tuple[str, ...]
    tried: Mapping[str, tuple[Any, ...]]


SWEPT = {
    "trellis": Swept(
        ("trellis/c64/both", "trellis/c64/v6e/both"),
        {
            "packs": (3,),
            "tokens": (1536, 6144),
            "in_step": (2, 8),
            "lags": ((2, 2, 1), (1, 1, 1), (1, 3, 1), (1, 2, 2)),
        },
    ),
    "lattice": Swept(
        ("lattice-dec/c64/both", "lattice-dec/c16/both", "lattice-dec/c64/v6e/both"),
        {
            "packs": (3,),
            "rows": (4, 16),
            "in_step": (6, 24),
            "lags": ((1, 8), (3, 8), (2, 7), (2, 9)),
        },
    ),
    "ttt_linear": Swept(
        ("ttt_linear/c16/both",),
        {
            "rows": (4, 16),
            "in_step": (6, 24),
            "lags": ((2, 6), (4, 6), (3, 5), (3, 7)),
        },
    ),
    "recurrence": Swept(("gated_delta_rule/qwen3.5/both",), {"packs": (4, 8)}),
    "causal_attention": Swept(
        ("attention/d64/t2048/both",), {"block": (512,), "tile": (128, 512)}
    ),
    "step": Swept(("decode/gated_deltanet",), {"heads": (4, 8)}),
    "head_step": Swept(
        ("decode/lattice", "decode/trellis"), {"heads": (4,), "bytes": (8 << 20,)}
    ),
}


def sizes_of(only: tuple[str, ...]) -> Iterator[tuple[str, str, str | None, Any]]:
    """Row, case, size and value of what is counted; no size for the table's own."""
    for name, swept in SWEPT.items():
        for case in swept.cases if not only or name in only else ():
            yield name, case, None, None
            for size, values in swept.tried.items():
                yield from ((name, case, size, value) for value in values)


def count_sizes(name: str, case: str, size: str | None, value: Any) -> dict[str, Any]:
    """Counts a case with one size changed."""
    found = count_case(case, sizes={name: {size: value}} if size else None)
    kept = ("unit", "cycles", "unknown_loops", "commit", "seconds")
    row = {"row": name, "case": case, "size": size, "value": value}
    return row | {field: found[field] for field in kept} | {"table": table_of(name)}


def table_of(name: str) -> str:
    """A row of the table."""
    return str(getattr(tuned.SIZES, name))


def main(
    only: tuple[Annotated[str, among(*SWEPT)], ...] = (), output: Output = OUTPUT
) -> None:
    """Counts, and writes the file anew after every count.

    Args:
        only: rows of the table; all unless given.
        output: where .json goes, without the ending.
    """
    version()
    file = Path(f"{output}.json")
    rows = results.read_object(file, "rows")["rows"] if file.exists() else []
    rows = [row for row in rows if row["table"] == table_of(row["row"])]
    known = {(row["case"], row["size"], str(row["value"])) for row in rows}
    for name, case, size, value in sizes_of(only):
        # JSON has lists where the table has tuples.
        listed = [*value] if isinstance(value, tuple) else value
        if (case, size, str(listed)) in known:
            continue
        row = count_sizes(name, case, size, listed)
        rows.append(row)
        results.write_report(output, QUESTION, {"only": only}, {"rows": rows})
        print(case, size or "the table's", listed, row["cycles"], flush=True)


@results.table("ops/sweep", "tpu/sweep")
def sweep(result: dict[str, Any]) -> results.Rows:
    """Each size's neighbours beside the table's value, by the lower end of cycles."""
    rows, found = result["rows"], {}
    for row in rows:
        found.setdefault(row["case"], {}).setdefault(row["size"], []).append(row)
    for case, by_size in found.items():
        (own,) = by_size.pop(None)
        for size, tried in by_size.items():
            values = (f"{row['value']}: {_least(row)}" for row in tried)
            yield {
                "cycles a token and head (decode: a token)": case,
                "the table's": _least(own),
                "size": size,
                "others: cycles": "; ".join(values),
            }
    yield f"counted at {', '.join(dict.fromkeys(row['commit'] for row in rows))}"


def _least(row: dict[str, Any]) -> str:
    return results.number(row["cycles"][0], 2)


if __name__ == "__main__":
    run(main)
