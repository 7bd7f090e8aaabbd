"""A table across all studies, with a row a paper."""

from typing import Any

from experiments.hmt.rows import AGAIN, CAUSAL, HIERARCHICAL, SINK_WINDOW
from experiments.lab.intervals import format_interval
from experiments.lab.results import Rows, number, spread, table
from experiments.memories.books import MEMORY
from experiments.memories.recall import SMALL_STEPS
from experiments.memories.recall_tables import both_columns
from experiments.mplus import answers


@table(
    "papers",
    "memories/books_window8",
    "memories/recall",
    "memories/columns/recall",
    "memories/trellis_steps",
    "hmt/smollm2/length",
    "mplus/retention",
)
def papers(
    books: dict[str, Any],
    recall: dict[str, Any],
    columns: dict[str, Any],
    steps: dict[str, Any],
    length: dict[str, Any],
    retention: dict[str, Any],
) -> Rows:
    """The claim of each paper, what was measured here, and at what size."""
    # From the abstracts.
    claims = {
        MEMORY: '"consistently outperformed baselines on long-context (32k+) datasets"',
        "Trellis": '"outperforms strong baselines" in language modeling and recall, by '
        "more in longer sequences",
        "Lattice": '"the best perplexity compared to all baselines across diverse '
        'context lengths"',
        "HMT": '"consistently improves the long-context processing ability of existing '
        'models"',
        "M+": '"extending knowledge retention from under 20k to 160k tokens with '
        'similar GPU memory"',
    }
    found = {name: _recalled(recall, columns, name) for name in ("Trellis", "Lattice")}
    measured, scale = found["Trellis"]
    found["Trellis"] = f"{measured}. {_perplexity(steps)}", scale
    found |= {MEMORY: _elastic(books), "HMT": _hmt(length)}
    found["M+"] = _mplus(retention)
    for paper, claim in claims.items():
        measured, scale = found[paper]
        room = {"HMT": "hmt", "M+": "mplus"}.get(paper, "memories")
        yield {
            "paper": paper,
            "what it claims": claim,
            "what was measured here": measured,
            "at what size": scale,
            "more": f"`experiments/{room}`",
        }


def _elastic(result: dict[str, Any]) -> tuple[str, str]:
    saved = " and ".join(
        f"{format_interval(found['all'])} over {base}"
        for base, found in result["gains"].items()
    )
    config, parameters = result["config"], result["models"][MEMORY]["parameters"]
    return (
        f"nats a token saved: {saved}, which keep as many bytes",
        f"{parameters:,} parameters, blocks of {config['window']}, "
        f"{result['steps']:,} updates, {config['seeds']} seeds",
    )


def _recalled(
    result: dict[str, Any], columns: dict[str, Any], name: str
) -> tuple[str, str]:
    """Recall by a mechanism and DeltaNet, at equal width and of earlier states."""
    count = max(result["task"]["pairs"])
    found = {
        row["name"]: spread(row["mean"], row["error"], 2)
        for row in result["accuracy"][str(result["task"]["scale"]["context_length"])]
        if row["pairs"] == count
    }
    rows = {row["name"]: row for row in result["rows"]}
    cells = {
        x["right answers"]: x for x in both_columns.rows(columns) if type(x) is dict
    }

    def wide(name: str) -> str:
        shares = (f"{cells[name][f'equal width: {n} pairs']} of {n}" for n in (16, 32))
        return " and ".join(shares) + " pairs"

    own = "not measured"
    if cells.get(name, {}).get("equal width: learned"):
        seeds = cells[name]["equal width: learned"]
        own = f"{wide(name)}, DeltaNet {wide('DeltaNet')}; {seeds} seeds learned"
    return (
        f"recall at equal width, as in the paper: {own}. In states of as many bytes, "
        f"with two copies of each memory, {found[name]} of {count} pairs, DeltaNet "
        f"{found['DeltaNet']}",
        f"states of {rows[name]['state_bytes']:,} bytes, DeltaNet's of "
        f"{rows['DeltaNet']['state_bytes']:,}; {rows[name]['parameters']:,} "
        f"parameters, {result['task']['scale']['steps']:,} updates, "
        f"{len(result['config']['seeds'])} seeds",
    )


def _perplexity(result: dict[str, Any]) -> str:
    """Perplexity of Trellis with small steps, DeltaNet and an n-gram."""
    found = {x["name"]: spread(x["mean"], x["error"], 2) for x in result["perplexity"]}
    return (
        f"PPL per byte {found[SMALL_STEPS]} with steps of at most 1/64, as wide as "
        f"DeltaNet ({found['DeltaNet']}); a counted 3-gram "
        f"{number(result['ngrams']['3-gram'], 2)}"
    )


def _hmt(result: dict[str, Any]) -> tuple[str, str]:
    # Full attention ends before the longest text does.
    ends = {name: values[-1] for name, values in result["perplexity"]["all"].items()}
    longest = {name: number(value, 2) for name, value in ends.items()}
    return (
        f"PPL {longest[CAUSAL]}, strictly causal ({longest[HIERARCHICAL]} as "
        f"published): window with sinks {longest[f'{SINK_WINDOW}, tuned']}, as many "
        f"tokens read again {longest[f'{AGAIN}, tuned']}; HMT was trained on fewer "
        "targets",
        f"SmolLM2-135M, {result['lengths'][-1]:,} tokens, "
        f"{len(result['documents'])} documents",
    )


def _mplus(result: dict[str, Any]) -> tuple[str, str]:
    found = answers.by_method(result)
    right = {name: number(x["after"][-1]["accuracy"], 2) for name, x in found.items()}
    return (
        f"right answers {result['distances'][-1]:,} tokens later, with the last of "
        f"three stages trained alone: {right['M+']}, with "
        f"a retriever fitted afterwards {right['M+, retriever fitted afterwards']}; "
        f"the "
        f"backbone tuned on as many updates, windows of its bytes on the device "
        f"{right['window, device, tuned']} and of all its bytes "
        f"{right['window, all, tuned']}, BM25 {right['BM25, tuned']}",
        f"SmolLM2-135M, 240 updates, {len(result['facts'])} facts, one seed",
    )
