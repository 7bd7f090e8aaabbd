"""Tables of speed: generation, M+, and the benchmark of the ops."""

from typing import Any

from experiments.tables.table import (
    Table,
    Tables,
    load,
    number,
    times,
)


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


def loops() -> Table:
    """How many times faster than chunks the token loop is, by sizes, on a CPU."""
    found: dict[tuple, dict[tuple[str, str], float]] = {}
    for row in load("ops/loops")["shapes"]:
        sizes = row["batch"] * row["heads"], row["width"]
        times_of = found.setdefault((row["op"], *sizes), {})
        times_of[row["implementation"], row["pass"]] = row["median_s"]
    shapes = sorted({key[1:] for key in found}, key=lambda s: s[0] * s[1] ** 2)
    rows = []
    for op in dict.fromkeys(key[0] for key in found):
        cells = [op]
        for direction in ("forward", "both"):
            for shape in shapes:
                taken = found[op, *shape]
                loop, chunks = (taken[w, direction] for w in ("reference", "xla"))
                cells.append(times(chunks / loop))
        rows.append(cells)
    memories = [
        f"{count} of {width}: {4 * count * width**2 / 2**20:.2g} MB"
        for count, width in shapes
    ]
    header = ["chunks / loop", *(f"forward, {m}" for m in memories)]
    header += [f"with backward, {m}" for m in memories]
    return Table(header, rows, ["ops/loops"])


def growth() -> Table:
    """Microseconds a token against length, forward with backward."""
    found = [row for row in load("ops/kernels")["growth"] if row["pass"] == "both"]
    lengths = sorted({row["time"] for row in found})
    cells = {(r["op"], r["time"]): number(1e6 / r["tokens_per_s"], 0) for r in found}
    ops = dict.fromkeys(row["op"] for row in found)
    rows = [[op, *(cells.get((op, n), "") for n in lengths)] for op in ops]
    header = ["µs a token", *(f"{n:,} tokens" for n in lengths)]
    return Table(header, rows, ["ops/kernels"])


TABLES: Tables = {
    "ops/kernels": kernels,
    "ops/growth": growth,
    "ops/loops": loops,
}
