"""A table across all studies, with a row a paper: `papers.txt`.

Claims are quoted from the abstracts; every number is read from the result files.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.lab.intervals import format_interval
from experiments.lab.results import Lookup, Rows, number, table, written
from experiments.memories.recall_tables import both_columns
from experiments.mplus.answers import by_method

COLUMNS = "paper|what it claims|what was measured here|at what size|more".split("|")
Result = dict[str, Any]


@table(
    "papers",
    "memories/books_window8",
    "memories/columns/recall",
    "memories/trellis_steps",
    "hmt/smollm2/length",
    "hmt/smollm2/length_equal",
    "mplus/retention",
    "mplus/stages",
)
def papers(*results: Result) -> Rows:
    """The claim of each paper, what was measured here, and at what size."""
    books, recall, steps, length, equal, retention, stages = results
    saved = [f"{format_interval(x['all'])} over {k}" for k, x in books["gains"].items()]
    methods, staged = by_method(retention), by_method(stages)
    perplexities, runs = steps["perplexity"], recall["rows"]
    evidence = {
        "books": books,
        "saved": " and ".join(saved),
        "wide": Lookup(lambda name: _recalled(recall, name, "width")),
        "narrow": Lookup(lambda name: _recalled(recall, name, "bytes")),
        "sizes": {f"{x['name']}/{x['column']}": f"{x['state_bytes']:,}" for x in runs},
        "parameters": f"{round(runs[0]['parameters'], -3):,}",
        "recall": recall,
        "steps": steps,
        "length": length,
        "length_equal": equal,
        "seeds": len(recall["config"]["seeds"]),
        "ppl": {x["name"]: f"{x['mean']:.2f} ± {x['error']:.2f}" for x in perplexities},
        "ngrams": {k: number(x, 2) for k, x in steps["ngrams"].items()},
        "hmt": _at_the_longest(length),
        "equal": _at_the_longest(equal),
        "targets": f"{equal['config']['targets']:,}",
        "tokens": f"{length['lengths'][-1]:,}",
        "documents": len(length["documents"]),
        "distance": f"{retention['distances'][-1]:,}",
        "right": _last_answers(methods),
        "staged": _last_answers(staged),
        "few": staged["M+"]["after"][-1]["questions"],
        "facts": len(retention["facts"]),
        "asked": {k: x["after"][-1]["questions"] for k, x in methods.items()},
    }
    return written(Path(__file__).with_suffix(".txt"), COLUMNS, evidence)


def _last_answers(methods: Mapping[str, Any]) -> dict[str, str]:
    """Shares of right answers after the longest distance."""
    return {k: number(x["after"][-1]["accuracy"], 2) for k, x in methods.items()}


def _at_the_longest(length: Result) -> dict[str, str]:
    """Perplexities; full attention ends before the longest text does."""
    rows = length["perplexity"]["all"]
    return {name: number(x[-1], 2) for name, x in rows.items()}


def _recalled(result: Result, name: str, equal: str) -> str:
    """Right answers of 16 and of 32 pairs, at equal width or in equal bytes."""
    rows = (row for row in both_columns.rows(result) if isinstance(row, dict))
    (cells,) = (x for x in rows if (x["right answers"], x["equal"]) == (name, equal))
    learned = "" if cells["learned"] == "5 of 5" else f", {cells['learned']} seeds"
    return f"{cells['16 pairs']} and {cells['32 pairs']}{learned}"
