"""Tables of the comparison of memories at equal bytes."""

from typing import Any

from experiments.lab.results import RESULTS
from experiments.tables.table import (
    Table,
    Tables,
    load,
    number,
    percent,
    spread,
    thousands,
)

_KINDS = ("proofs", "code", "prose")
_SUMMARY, _LAYERS = "memories/equal_bytes", "memories/layers"
_ALIGNMENT = "memories/alignment"


def _rows() -> list[dict[str, Any]]:
    return load(_SUMMARY)["rows"]


def _name(row: dict[str, Any]) -> str:
    return row["label"] + (f", seed {row['seed']}" if row["training"] else "")


def perplexity() -> Table:
    """By kind, and what is saved over the wide window of equal bytes."""
    rows = []
    for row in _rows():
        saved = row.get("saved", {})
        rows.append(
            [
                _name(row),
                thousands(row["bytes"]),
                *(number(row["perplexity"][kind], 2) for kind in _KINDS),
                *(_gain(saved.get(kind)) for kind in _KINDS),
                row.get("saved_over", ""),
            ]
        )
    rows += [[f"{name}: not run yet", *[""] * 8] for name in load(_SUMMARY)["missing"]]
    header = ["", "bytes kept", *(f"PPL, {kind}" for kind in _KINDS)]
    header += [f"nats saved over a window of its bytes, {kind}" for kind in _KINDS]
    return Table([*header, "which window"], rows, [_SUMMARY])


def _gain(saved: dict[str, float] | None) -> str:
    """Nats with the 95% interval by document."""
    if saved is None:
        return ""
    low, high = (f"{saved[end]:+.3f}" for end in ("low", "high"))
    return f"{saved['nats']:+.3f} ({low} to {high})"


def saved() -> Table:
    """What each tuned memory saves over the tuned window of its bytes."""
    rows = [
        [
            _name(row),
            *(_gain(row["saved"][kind]) for kind in _KINDS),
            f"{row['bytes'] / 1e6:.2f} MB",
        ]
        for row in _rows()
        if row["training"] and "saved" in row
    ]
    header = ["nats a token saved over a window of its bytes", *_KINDS]
    return Table([*header, "kept in all"], rows, [_SUMMARY])


def positions() -> Table:
    """Perplexity by position."""
    edges = load(_SUMMARY)["edges"]
    rows = [
        [_name(row), *(number(x, 2) for x in row["perplexity_by_position"])]
        for row in _rows()
    ]
    bins = zip(edges[:-1], edges[1:], strict=True)
    header = [f"{thousands(a)} to {thousands(b)}" for a, b in bins]
    return Table(["PPL of tokens", *header], rows, [_SUMMARY])


def questions() -> Table:
    """Needles by length, and facts by distance."""
    found = _rows()
    lengths, distances = (list(found[0][name]) for name in ("needles", "facts"))
    mean = lambda cells: sum(x["right"] for x in cells.values()) / len(cells)
    rows = [
        [
            _name(row),
            *(percent(mean(row["needles"][length])) for length in lengths),
            *(percent(row["facts"][distance]["right"]) for distance in distances),
        ]
        for row in found
    ]
    header = [f"needle in {thousands(int(n))}" for n in lengths]
    header += [f"fact {thousands(int(n))} tokens back" for n in distances]
    return Table(["right answers", *header], rows, [_SUMMARY])


def cost() -> Table:
    """What training and reading took on one core."""
    rows = []
    for row in _rows():
        reading, training = row["reading"], row["training"] or {}
        updates, tokens = training.get("updates"), training.get("tokens")
        rows.append(
            [
                _name(row),
                number(reading["tokens"] / reading["cpu_seconds"], 0),
                thousands(updates) if updates else "",
                thousands(tokens) if tokens else "",
                f"{training['rate']:g}" if training else "",
                number(training.get("cpu_seconds"), 0),
            ]
        )
    header = ["", "tokens read in a CPU second", "updates", "training tokens"]
    return Table([*header, "learning rate", "CPU seconds"], rows, [_SUMMARY])


def layers() -> Table:
    """Layers whose window costs most alone."""
    rises = load(_LAYERS)["rise"]
    order = sorted(range(len(rises)), key=lambda i: -rises[i]["all"]["nats"])
    cells = lambda rise: [
        spread(rise[kind]["nats"], rise[kind]["standard_error"], 4)
        for kind in ("all", *_KINDS)
    ]
    rows = [[f"layer {i}", *cells(rises[i])] for i in order]
    return Table(["windowed alone: nats lost", "all", *_KINDS], rows, [_LAYERS])


def greedy() -> Table:
    """Perplexity of windows with full attention in more and more layers."""
    result = load(_LAYERS)
    line = lambda name, found: [name, *(number(found[k], 2) for k in ("all", *_KINDS))]
    rows = [line("windows in all layers", result["perplexity_windowed"])]
    for pick in result["greedy"]:
        rows.append(line(f"and full attention in {pick['layer']}", pick["perplexity"]))
    rows.append(line("full attention in all", result["perplexity_full"]))
    return Table(["PPL beyond the window", "all", *_KINDS], rows, [_LAYERS])


def alignment() -> Table:
    """Share of full attention's output that each memory misses in one layer."""
    result = load(_ALIGNMENT)
    rows = []
    for line in result["summary"]:
        name = line["name"]
        rate = result["rates"].get(name)
        cells = [name, thousands(result["bytes"][name]), f"{rate:g}" if rate else ""]
        cells += [number(line[kind]["missed"], 3) for kind in _KINDS]
        # In pairs of documents; a wide window has nothing to win over itself.
        won = [line[kind] | {"nats": line[kind]["mean"]} for kind in _KINDS]
        wide = name == line["base"]
        cells += [_gain(None if wide else gain) for gain in won]
        rows.append([*cells, "" if wide else line["base"]])
    rows += [[f"{name}: not run yet", *[""] * 9] for name in result["missing"]]
    header = ["share missed", "bytes beside the window", "learning rate", *_KINDS]
    header += [f"less than a window of its bytes, {kind}" for kind in _KINDS]
    return Table([*header, "which window"], rows, [_ALIGNMENT])


def _has(name: str, field: str) -> bool:
    """Whether a result has been measured; the rows come one after the other."""
    file = RESULTS / f"{name}.json"
    return file.is_file() and field in load(name)


TABLES: Tables = {
    f"memories/{function.__name__}": function
    for function, name, field in (
        (perplexity, _SUMMARY, "rows"),
        (saved, _SUMMARY, "rows"),
        (positions, _SUMMARY, "rows"),
        (questions, _SUMMARY, "rows"),
        (cost, _SUMMARY, "rows"),
        (layers, _LAYERS, "rise"),
        (greedy, _LAYERS, "greedy"),
        (alignment, _ALIGNMENT, "summary"),
    )
    if _has(name, field)
}
