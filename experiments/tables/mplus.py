"""Tables of what M+ knows: the experiments in `experiments/mplus`."""

from collections.abc import Sequence
from typing import Any

from experiments.mplus.recipe import in_words
from experiments.mplus.retention.recorded import by_method
from experiments.tables.table import Table, Tables, load, number, thousands, times


def retention() -> Table:
    """Right answers by distance, with all bytes that are kept."""
    result = load("mplus/retention")
    asked, distances = len(result["facts"]), result["distances"]
    found = result["rows"].values()
    measured = {f"{row['date']} in {x}" for row in found for x in row["commits"]}
    rows, notes = [], [f"rows measured {', '.join(sorted(measured))}"]
    for method in by_method(result).values():
        count = max(row["questions"] for row in method["after"])
        if not count:
            continue
        label = method["label"]
        if len(method["seeds"]) > 1:
            label += f", {len(method['seeds'])} seeds"
        facts = str(count) if count == asked else f"{count} of {asked}"
        shares = [_share(row) for row in method["after"]]
        lead = [_difference(gain) if gain else "" for gain in method["gain"]]
        # Where a method could not be asked, it keeps nothing to answer from.
        pairs = zip(method["kept_bytes"], method["after"], strict=True)
        kept = _kept([size for size, row in pairs if row["questions"]])
        rows.append([label, facts, *kept, *shares, *lead])
        notes += [in_words(x) for x in method["recipes"]]
    header = ["right answers (95% interval)", "facts", "MB kept", "on the device"]
    header += [f"after {thousands(n)} tokens" for n in distances]
    header += [f"M+ more, after {thousands(n)}" for n in distances]
    # Rows of one model have one recipe.
    notes = [*dict.fromkeys(notes)]
    return _without_empty(Table(header, rows, ["mplus/retention"], notes))


def _difference(found: dict[str, float]) -> str:
    """A difference with both ends of its interval."""
    return f"{found['mean']:+.2f} ({found['low']:+.2f} to {found['high']:+.2f})"


def _share(row: dict[str, Any]) -> str:
    if not row["questions"]:
        return "beyond its positions"
    return f"{row['accuracy']:.2f} ({row['low']:.2f} to {row['high']:.2f})"


def _kept(kept: Sequence[dict[str, int]]) -> list[str]:
    """Megabytes at the distance where the most is kept: in all, and on the device."""
    most = max(kept, key=lambda x: x["device"] + x["host"])
    shown = (most["device"] + most["host"], most["device"])
    return [number(size / 1e6, 2 if size < 1e6 else 0) for size in shown]


def _without_empty(table: Table) -> Table:
    """The table without the columns that say nothing."""
    kept = [i for i, cells in enumerate(zip(*table.rows, strict=True)) if any(cells)]
    take = lambda row: [row[i] for i in kept]
    return table._replace(header=take(table.header), rows=[*map(take, table.rows)])


#: Result files of retrieval quality, by the retriever that they asked.
_RETRIEVERS = {
    "learned with the model": "mplus/retrieval",
    "fitted afterwards": "mplus/retrieval_fitted",
}


def retrieval_quality() -> Table:
    """Shares of rows that both retrievers find, against chance."""
    rows, notes = [], []
    for name, file in _RETRIEVERS.items():
        result = load(file)
        found = zip(result["distances"], result["after"].values(), strict=True)
        rows += [[name, thousands(n), *_retrieved(row)] for n, row in found]
        notes += _recipe(result)
    header = ["retriever", "tokens since", "rows of the answer's sentence"]
    header += ["against chance", "rows of the fact's context", "against chance"]
    header.append("chance")
    return Table(header, rows, [*_RETRIEVERS.values()], [*dict.fromkeys(notes)])


def _retrieved(row: dict[str, Any]) -> list[str]:
    """Shares of the sentence's rows and of the context's, each against chance."""
    answer = row["answer"]
    return [
        number(answer["share"], 2),
        times(answer["times_random"]),
        number(row["share"], 2),
        times(row["times_random"]),
        number(row["share_random"], 2),
    ]


def perplexity() -> Table:
    """Perplexity after so many tokens of the same text."""
    result = load("mplus/perplexity")
    rows = []
    for name, values in result["perplexity"].items():
        if name in result["leaking"]:
            continue
        kept = result["kept_bytes"][name]
        size = None if kept is None else (kept["device"] + kept["host"]) / 1e6
        cells = [number(value, 2) for value in values]
        rows.append([name, number(size, 2 if size and size < 1 else 0), *cells])
    notes = [f"{name}: {in_words(x)}" for name, x in result["recipes"].items()]
    columns = [f"after {thousands(n)}" for n in result["tokens_told"]]
    return Table(["PPL", "MB kept", *columns], rows, ["mplus/perplexity"], notes)


def _recipe(result: dict[str, Any]) -> list[str]:
    """How the model of a result was trained, for the caption."""
    stages = result.get("recipe", "not recorded")
    if stages == "not recorded":
        return ["recipe and seed were not recorded"]
    return [in_words(stages)] if stages else []


TABLES: Tables = {
    "mplus/retention": retention,
    "mplus/retrieval": retrieval_quality,
    "mplus/perplexity": perplexity,
}
