"""Tables across all rooms: a row a paper, and a row a layer.

`papers`: its claim, what was measured here, and at what size. `layers` is of the guide
"Which memory when": all layers at one size, side by side.
"""

import statistics

from experiments.hmt.rows import AGAIN, HIERARCHICAL, SINK_WINDOW
from experiments.tables.table import Table, Tables, load, number, spread, times


def papers() -> Table:
    """One row a paper, each from its own result file."""
    rows = [_elastic(), _trellis(), _lattice(), _hmt(), _mplus()]
    header = ["paper", "what it claims", "what was measured here", "at what size"]
    sources = ["books/window8", "recurrent/trellis_ablation"]
    sources += ["recurrent/lattice_ablation", "hmt/smollm2/length"]
    sources += ["mplus/retention_16_facts", "mplus/speed"]
    return Table([*header, "more"], rows, sources)


def _more(room: str) -> str:
    return f"`experiments/{room}`"


def _elastic() -> list[str]:
    result = load("books/window8")
    gain, models = result["gain"]["all"], result["models"]
    plain, memory = (number(x["beyond_window"], 2) for x in models.values())
    return [
        "Elastic Memory",
        "a compressed history lowers perplexity beyond the window",
        f"PPL beyond the window {plain} without, {memory} with the memory: "
        f"{number(gain['nats'], 3)} nats saved a token, one seed",
        f"{models['elastic']['parameters']:,} parameters, windows of "
        f"{result['config']['window']}, {result['steps']:,} updates",
        _more("elastic"),
    ]


def _mean(result: dict, name: str) -> str:
    (row,) = [row for row in result["perplexity"] if row["name"] == name]
    return spread(row["mean"], row["error"], 2)


def _size(result: dict) -> str:
    row = result["rows"][0]
    seeds = len(result["config"]["seeds"])
    updates = result["scale"]["steps"]
    return f"{row['parameters']:,} parameters, {updates} updates, {seeds} seeds"


def _trellis() -> list[str]:
    result = load("recurrent/trellis_ablation")
    plain, gated = _mean(result, "DeltaNet"), _mean(result, "Trellis")
    without = _mean(result, "without forget gate")
    return [
        "Trellis",
        "below DeltaNet and TTT; the forget gate helps",
        f"PPL {gated}, DeltaNet {plain}; without the forget gate {without}",
        _size(result),
        _more("recurrent"),
    ]


def _lattice() -> list[str]:
    result = load("recurrent/lattice_ablation")
    names = ("DeltaNet", "normalised projection", "ENC")
    plain, lattice, best = (_mean(result, name) for name in names)
    return [
        "Lattice",
        "writing only what is orthogonal to a slot beats DeltaNet",
        f"PPL {lattice}, its ENC form {best}, DeltaNet {plain}",
        _size(result),
        _more("recurrent"),
    ]


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
    result = load("mplus/retention_16_facts")
    at = result["distances"].index(4096)
    answers = {
        name: number(list(found["after"].values())[at]["accuracy"], 2)
        for name, found in result["methods"].items()
    }
    fast = load("mplus/speed")["rounds"][0]["implementations"]["ours"]["inject"]
    return [
        "M+",
        "facts stay known longer than with a window of its bytes on the device, not "
        "longer than with full attention of its bytes in all",
        f"right answers 4,096 tokens later: {answers['M+']}, full attention "
        f"{answers['full']}, BM25 {answers['BM25']}, window without sinks "
        f"{answers['window']}; injects {times(fast['speedup']['official'])} as fast as "
        "the authors' program",
        "SmolLM2-135M, 240 updates, 16 facts",
        _more("mplus"),
    ]


def layers() -> Table:
    """Size of the state, perplexity, recall and training time of each mixer."""
    texts, recall = load("recurrent/context_length"), load("recurrent/recall")
    shortest, *_, longest = sorted(texts["config"]["contexts"])
    recalled = {
        row["name"]: spread(row["mean"], row["error"], 2)
        for row in recall["accuracy"]["MQAR"]
        if row["pairs"] == 8
    }
    rows = []
    for score in texts["perplexity"]:
        if score["context_length"] != longest:
            continue
        name = score["name"]
        short, long = (_runs(texts, name, length) for length in (shortest, longest))
        grown = long[0]["state_bytes"] - short[0]["state_bytes"]
        rows.append(
            [
                name,
                number(long[0]["state_bytes"], 0),
                number(grown / (longest - shortest), 0),
                spread(score["mean"], score["error"], 2),
                recalled[name],
                number(statistics.median(run["seconds"] for run in long), 0),
            ]
        )
    header = ["two layers of 64", f"state bytes after {longest} tokens"]
    header += ["bytes more a token", f"PPL, {longest} tokens", "recall of 8 pairs"]
    sources = ["recurrent/context_length", "recurrent/recall"]
    return Table([*header, "seconds of training"], rows, sources)


def _runs(result: dict, name: str, length: int) -> list[dict]:
    """The runs of a mixer at a length of context, one a seed."""
    return [
        row
        for row in result["rows"]
        if row["name"] == name and row["context_length"] == length
    ]


TABLES: Tables = {"papers": papers, "guide/layers": layers}
