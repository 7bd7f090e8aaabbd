"""The table of the guide "Which memory when": all layers at one size, side by side."""

import statistics

from experiments.tables.table import Table, Tables, load, number, spread


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


TABLES: Tables = {"guide/layers": layers}
