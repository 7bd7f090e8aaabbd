"""Tables of what M+ costs: the experiments in `experiments/mplus/speed`."""

from experiments.tables.table import Table, Tables, load, number, thousands, times

_OFFICIAL = {
    "official": "the authors' program",
    "official_fused": "the same, with PyTorch's fused attention",
}


def speed() -> Table:
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


def growth() -> Table:
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


def cost() -> Table:
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


TABLES: Tables = {"mplus/speed": speed, "mplus/growth": growth, "mplus/cost": cost}
