"""Tables of what was checked and timed on a GPU."""

from typing import Any

from experiments.tables.table import Table, Tables, load, number, times

_MEASURED = ("memory", "reads", "gradient")


def kernels() -> Table:
    """Milliseconds of XLA, our kernels and flash-linear-attention."""
    found: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    for row in load("ops/kernels_gpu")["shapes"]:
        # The faster of two kernels of flash-linear-attention.
        name = "fla" if row["implementation"].startswith("fla.") else "kernel"
        name = "xla" if row["implementation"] == "xla" else name
        by = found.setdefault(row["op"], {})
        before = by.get((name, row["pass"]), row)
        faster = min(row, before, key=lambda row: row["median_s"])
        by[name, row["pass"]] = faster
    rows = []
    for op, by in found.items():
        cells = [op]
        for direction in ("forward", "both"):
            for name in ("xla", "kernel", "fla"):
                row = by.get((name, direction))
                cells.append(number(1e3 * row["median_s"], 2) if row else "")
        best = min(r["times_roofline"] for (n, d), r in by.items() if d == "both")
        rows.append([*cells, times(best)])
    names = ("XLA", "kernel", "fla")
    header = ["op", *(f"forward, {n}: ms" for n in names)]
    header += [f"with backward, {n}: ms" for n in names]
    return Table([*header, "fastest over roofline"], rows, ["ops/kernels_gpu"])


def growth() -> Table:
    """Milliseconds at one long sequence."""
    found: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = {}
    for row in load("ops/kernels_gpu")["growth"]:
        key = row["op"], row["implementation"], row["time"]
        found.setdefault(key, {})[row["pass"]] = row
    rows = []
    for (op, implementation, tokens), by in found.items():
        cells = [number(1e3 * by[d]["median_s"], 2) for d in ("forward", "both")]
        rows.append([f"{op}, {implementation}", f"{tokens:,}", *cells])
    header = ["op", "tokens", "forward: ms", "with backward: ms"]
    return Table(header, rows, ["ops/kernels_gpu"])


def check() -> Table:
    """The largest differences of each kernel from the token loop, by chunk size."""
    files = ["ops/check_gpu", "ops/check_gpu_second"]
    first, second = (load(name) for name in files)
    # Of a case that was checked twice, the second row.
    cases = {row["case"]: row for row in first["cases"] + second["cases"]}
    found: dict[str, list[dict[str, Any]]] = {}
    for name, row in cases.items():
        op, _, chunk, *_ = name.split()
        found.setdefault(f"{op}, chunks of {chunk}", []).append(row)
    rows = []
    for name, checked in found.items():
        worst = [f"{max(row[key] for row in checked):.1e}" for key in _MEASURED]
        agree = sum(row["agrees"] for row in checked)
        rows.append([name, str(len(checked)), str(agree), *worst])
    tolerance = f"within {second['config']['tolerance']}"
    header = ["kernel", "cases", tolerance, *(f"worst {key}" for key in _MEASURED)]
    return Table(header, rows, files)


TABLES: Tables = {
    "ops/kernels_gpu": kernels,
    "ops/growth_gpu": growth,
    "ops/check_gpu": check,
}
