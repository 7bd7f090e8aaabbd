"""Tables of the experiments with M+."""

from experiments.tables.table import Table, Tables, load, number, thousands, times

_OFFICIAL = {
    "official": "the authors' program",
    "official_fused": "the same, with PyTorch's fused attention",
}


def _right_answers(name: str) -> Table:
    """Shares of right answers, with their 95% intervals, by distance."""
    result = load(name)
    rows = []
    for method, found in result["methods"].items():
        cells = [
            f"{row['accuracy']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
            if row["questions"]
            else "beyond its positions"
            for row in found["after"].values()
        ]
        rows.append([method, *cells])
    columns = [f"after {thousands(n)} tokens" for n in result["distances"]]
    return Table(["right answers (95% interval)", *columns], rows, [name])


def retention() -> Table:
    """All methods."""
    return _right_answers("mplus/retention")


def retention_stages() -> Table:
    """M+ of three stages beside the MemoryLLM of its second."""
    return _right_answers("mplus/retention_stages")


def retrieval_quality() -> Table:
    """Shares of rows that the retriever finds, against chance."""
    result = load("mplus/retrieval_quality")
    rows = [
        [
            thousands(distance),
            number(row["answer"]["share"], 2),
            times(row["answer"]["times_random"]),
            number(row["share"], 2),
            times(row["times_random"]),
            number(row["share_random"], 2),
        ]
        for distance, row in zip(
            result["distances"], result["after"].values(), strict=True
        )
    ]
    header = ["tokens since", "rows of the answer's sentence", "against chance"]
    header += ["rows of the fact's context", "against chance", "chance"]
    return Table(header, rows, ["mplus/retrieval_quality"])


def perplexity() -> Table:
    """Perplexity after so many tokens of the same text."""
    result = load("mplus/perplexity")
    rows = [
        [name, *(number(value, 2) for value in values)]
        for name, values in result["perplexity"].items()
        if name not in result["leaking"]
    ]
    columns = [f"after {thousands(n)}" for n in result["tokens_told"]]
    return Table(["PPL", *columns], rows, ["mplus/perplexity"])


def short() -> Table:
    """Short texts and closed-book answers."""
    rows = [
        [
            name,
            number(row["perplexity"], 1),
            number(row["nats_lost"]["mean"], 3),
            number(row["right"]["accuracy"], 2),
        ]
        for name, row in load("mplus/short")["models"].items()
    ]
    header = ["", "PPL", "nats lost against the backbone", "right answers of four"]
    return Table(header, rows, ["mplus/short"])


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


TABLES: Tables = {
    "mplus/retention": retention,
    "mplus/retention_stages": retention_stages,
    "mplus/retrieval_quality": retrieval_quality,
    "mplus/perplexity": perplexity,
    "mplus/short": short,
    "mplus/speed": speed,
    "mplus/growth": growth,
    "mplus/cost": cost,
}
