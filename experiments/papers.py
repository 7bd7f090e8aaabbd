"""A table across all studies, with a row a paper: `papers.txt`.

Claims are quoted from the abstracts; every number is read from the result files.
"""

from pathlib import Path
from typing import Any

from experiments.lab.intervals import format_interval
from experiments.lab.results import Lookup, Rows, number, spread, table, written
from experiments.memories.recall_tables import both_columns
from experiments.mplus.answers import by_method

COLUMNS = "paper|what it claims|what was measured here|at what size|more".split("|")
Result = dict[str, Any]


@table(
    "papers",
    "memories/books_window8",
    "memories/recall",
    "memories/columns/recall",
    "memories/trellis_steps",
    "hmt/smollm2/length",
    "mplus/retention",
)
def papers(*results: Result) -> Rows:
    """The claim of each paper, what was measured here, and at what size."""
    books, recall, columns, steps, length, retention = results
    saved = [f"{format_interval(x['all'])} over {k}" for k, x in books["gains"].items()]
    by_length, methods = length["perplexity"]["all"], by_method(retention)
    evidence = {
        "books": books,
        "saved": " and ".join(saved),
        "wide": Lookup(lambda name: _at_equal_width(columns, name)),
        "narrow": _at_training_length(recall),
        "sizes": {row["name"]: row for row in recall["rows"]},
        "recall": recall,
        "seeds": len(recall["config"]["seeds"]),
        "ppl": {x["name"]: _mean(x) for x in steps["perplexity"]},
        "ngrams": {k: number(x, 2) for k, x in steps["ngrams"].items()},
        # Full attention ends before the longest text does.
        "hmt": {name: number(x[-1], 2) for name, x in by_length.items()},
        "tokens": f"{length['lengths'][-1]:,}",
        "documents": len(length["documents"]),
        "distance": f"{retention['distances'][-1]:,}",
        "right": {k: number(x["after"][-1]["accuracy"], 2) for k, x in methods.items()},
        "facts": len(retention["facts"]),
    }
    return written(Path(__file__).with_suffix(".txt"), COLUMNS, evidence)


def _mean(row: Result) -> str:
    return spread(row["mean"], row["error"], 2)


def _at_equal_width(result: Result, name: str) -> str:
    """Recall by a mechanism and DeltaNet, of memories of one width."""
    rows = (row for row in both_columns.rows(result) if isinstance(row, dict))
    cells = {row["right answers"]: row for row in rows}
    seeds = cells.get(name, {}).get("equal width: learned")
    if not seeds:
        return "not measured"

    def shares(name: str) -> str:
        each = (f"{cells[name][f'equal width: {n} pairs']} of {n}" for n in (16, 32))
        return f"{' and '.join(each)} pairs"

    return f"{shares(name)}, DeltaNet {shares('DeltaNet')}; {seeds} seeds learned"


def _at_training_length(result: Result) -> dict[str, str]:
    """Recall of the most pairs of the training, in states of as many bytes."""
    task = result["task"]
    rows = result["accuracy"][str(task["scale"]["context_length"])]
    most = max(task["pairs"])
    return {row["name"]: _mean(row) for row in rows if row["pairs"] == most}
