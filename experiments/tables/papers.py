"""Tables across all rooms: a row a paper, and a row a layer.

`papers`: its claim, what was measured here, and at what size. `layers` is of the guide
"Which memory when": all layers at one size, side by side.
"""

from experiments.hmt.rows import AGAIN, HIERARCHICAL, SINK_WINDOW
from experiments.lab.intervals import format_interval
from experiments.memories.books import MEMORY
from experiments.mplus import answers
from experiments.tables.table import (
    Table,
    Tables,
    load,
    number,
    spread,
    times,
)


def papers() -> Table:
    """One row a paper, each from its own result file."""
    rows = [_elastic(), _trellis(), _lattice(), _hmt(), _mplus()]
    header = ["paper", "what it claims", "what was measured here", "at what size"]
    sources = ["memories/books_window8", "memories/recall", "hmt/smollm2/length"]
    sources += ["mplus/retention", "speed/official_mplus"]
    return Table([*header, "more"], rows, sources)


def _more(room: str) -> str:
    return f"`experiments/{room}`"


def _elastic() -> list[str]:
    result = load("memories/books_window8")
    saved = [
        f"{format_interval(found['all'])} over {base}"
        for base, found in result["gains"].items()
    ]
    config, models = result["config"], result["models"]
    return [
        MEMORY,
        "a compressed history lowers perplexity beyond the window",
        f"nats a token saved: {' and '.join(saved)}, which keep as many bytes",
        f"{models[MEMORY]['parameters']:,} parameters, blocks of {config['window']}, "
        f"{result['steps']:,} updates, {config['seeds']} seeds",
        _more("memories"),
    ]


def _recalled(name: str) -> str:
    """What a mechanism and DeltaNet recall, and of what size both are."""
    result = load("memories/recall")
    length = result["task"]["scale"]["context_length"]
    count = max(result["task"]["pairs"])
    found = {
        row["name"]: spread(row["mean"], row["error"], 2)
        for row in result["accuracy"][str(length)]
        if row["pairs"] == count
    }
    return f"of {count} pairs {found[name]} recalled, DeltaNet {found['DeltaNet']}"


def _size() -> str:
    result = load("memories/recall")
    (row, *_) = [row for row in result["rows"] if row["name"] == "DeltaNet"]
    seeds = len(result["config"]["seeds"])
    updates = result["task"]["scale"]["steps"]
    return (
        f"states of {row['state_bytes']:,} bytes, {row['parameters']:,} parameters, "
        f"{updates:,} updates, {seeds} seeds"
    )


def _trellis() -> list[str]:
    claim = "recalls more than DeltaNet and TTT with a state of constant size"
    return ["Trellis", claim, _recalled("Trellis"), _size(), _more("memories")]


def _lattice() -> list[str]:
    claim = "writing only what is orthogonal to a slot beats DeltaNet"
    return ["Lattice", claim, _recalled("Lattice"), _size(), _more("memories")]


def _hmt() -> list[str]:
    result = load("hmt/smollm2/length")
    longest = {
        name: number(values[-1], 2)
        for name, values in result["perplexity"]["all"].items()
        # Full attention ends before the longest text does.
        if values[-1] is not None
    }
    tuned = [f"{SINK_WINDOW}, tuned", f"{AGAIN}, tuned"]
    if {HIERARCHICAL, *tuned} <= {*longest}:
        loops = [result["training"][f"stage{n}"]["loop"] for n in (1, 2)]
        measured = f"PPL {longest[HIERARCHICAL]}"
        names, size = tuned, f"{sum(loop['steps'] for loop in loops)} updates"
    else:
        measured, size = (
            "not run yet with the baselines that it has to beat",
            "untrained",
        )
        names = [SINK_WINDOW, AGAIN]
    measured += f": window with sinks {longest[names[0]]}, "
    measured += f"as many tokens read again {longest[names[1]]}"
    return [
        "HMT",
        "perplexity below a window of equal memory on a pretrained model",
        measured,
        f"SmolLM2-135M, {size}, {result['lengths'][-1]:,} tokens, "
        f"{len(result['documents'])} documents",
        _more("hmt"),
    ]


def _mplus() -> list[str]:
    result = load("mplus/retention")
    found = answers.by_method(result)
    right = lambda name: number(found[name]["after"][-1]["accuracy"], 2)
    longest = f"{result['distances'][-1]:,}"
    fast = load("speed/official_mplus")["rounds"][0]["implementations"]["ours"][
        "inject"
    ]
    return [
        "M+",
        "facts stay known longer than with as many bytes on the device and no store",
        f"right answers {longest} tokens later: {right('M+')}, with a retriever "
        f"fitted afterwards {right('M+, retriever fitted afterwards')}; tuned alike, "
        f"windows of its bytes on the device {right('window, device, tuned')} and of "
        f"all its bytes {right('window, all, tuned')}, BM25 {right('BM25, tuned')}; "
        f"injects {times(fast['speedup']['official'])} as fast as the authors' program",
        f"SmolLM2-135M, 240 updates, {len(result['facts'])} facts, one seed",
        _more("mplus"),
    ]


def layers() -> Table:
    """Size of the state and recall of each mechanism, near and far."""
    result = load("memories/recall")
    near, *_, far = result["task"]["lengths"]
    count = max(result["task"]["pairs"])
    recalled = {
        (row["name"], length): spread(row["mean"], row["error"], 2)
        for length in (near, far)
        for row in result["accuracy"][str(length)]
        if row["pairs"] == count
    }
    rows = []
    for name in dict.fromkeys(row["name"] for row in result["rows"]):
        runs = [row for row in result["rows"] if row["name"] == name]
        rows.append(
            [
                name,
                number(runs[0]["state_bytes"], 0),
                recalled[name, near],
                recalled[name, far],
            ]
        )
    header = ["two layers of 32", "state bytes"]
    header += [f"recall of {count} pairs, {n:,} tokens" for n in (near, far)]
    return Table(header, rows, ["memories/recall"])


TABLES: Tables = {"papers": papers, "guide/layers": layers}
