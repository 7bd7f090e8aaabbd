"""Tables of speed: generation, M+, and the benchmark of the ops."""

from typing import Any

from experiments.tables.table import (
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
_OFFICIAL = {
    "official": "the authors' program",
    "official_fused": "the same, with PyTorch's fused attention",
}


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


def mplus_speed() -> Table:
    """Seconds of injecting, reading and searching, with speedups of ours."""
    result = load("mplus/speed")
    parts = [
        (f"{act}, pool {thousands(m['pool'])}, store {thousands(m['store'])}", row, act)
        for row in result["rounds"]
        for m in [row["memory"]]
        for act in ("inject", "read")
    ]
    parts.append(("one layer's search", result["search"], "search"))
    rows = []
    for label, row, act in parts:
        found = row["implementations"]
        ours = found["ours"][act]
        cells = [number(ours["median_s"], 3)]
        for name in _OFFICIAL:
            cells.append(number(found[name][act]["median_s"], 3))
            cells.append(times(ours["speedup"][name]))
        rows.append([label, *cells])
    header = ["seconds", "memjax"]
    for name in _OFFICIAL.values():
        header += [name, "speedup"]
    return Table(header, rows, ["mplus/speed"])


def mplus_growth() -> Table:
    """Seconds of a single inject into an empty store, and after all injects."""
    found = load("mplus/speed")["growth"]["implementations"]
    names = {"ours": "memjax"} | _OFFICIAL
    ends = ("first_tenth_s", "last_tenth_s")
    rows = [
        [label, *(number(1e3 * found[n][end], 0) for end in ends)]
        for n, label in names.items()
    ]
    return Table(["ms an inject", "first tenth", "last tenth"], rows, ["mplus/speed"])


# Of the lengths that were measured; the file has more.
_COST_LENGTHS = (2048, 32_768, 131_072)


def mplus_cost() -> Table:
    """Memory on the device and time, by tokens injected."""
    rows = []
    for kind, found in load("mplus/cost")["models"].items():
        for row in found:
            if row["length"] not in _COST_LENGTHS:
                continue
            seconds = row.get("seconds", {})
            device = row.get("place_bytes", {}).get("device")
            rows.append(
                [
                    kind,
                    thousands(row["length"]),
                    number(None if device is None else device / 1e6, 1),
                    number(row["state_bytes"]["total"] / 1e6, 1),
                    number(seconds.get("inject"), 1),
                    number(seconds.get("query"), 2),
                    number(row["operations"]["inject"] / 1e9, 0),
                ]
            )
    header = ["", "tokens", "MB on the device", "state, MB", "inject, s", "query, s"]
    return Table([*header, "inject, GFLOP"], rows, ["mplus/cost"])


def packing() -> Table:
    """Real tokens a second of every kind of rows."""
    rows = [
        [
            model.removesuffix("-tiny"),
            name,
            percent(row["read"]),
            percent(row["full"]),
            number(row["tokens_per_s"], 0),
            f"{row['quartiles_s'][0]:.2f} to {row['quartiles_s'][1]:.2f}",
        ]
        for model, found in load("packing/packing")["models"].items()
        for name, row in found.items()
    ]
    header = ["mechanism", "rows", "an epoch reads", "places with a target"]
    header += ["targets a second", "s an update, quartiles"]
    return Table(header, rows, ["packing/packing"])


TABLES: Tables = {
    "generation/speed": speed,
    "generation/streaming": streaming,
    "ops/kernels": kernels,
    "ops/growth": growth,
    "ops/loops": loops,
    "packing/packing": packing,
    "mplus/speed": mplus_speed,
    "mplus/growth": mplus_growth,
    "mplus/cost": mplus_cost,
}
