"""A table across all studies, with a row a paper."""

from typing import Any

from experiments.hmt.rows import AGAIN, CAUSAL, HIERARCHICAL, SINK_WINDOW
from experiments.lab.intervals import format_interval
from experiments.lab.results import Rows, number, spread, table, times
from experiments.memories.books import MEMORY
from experiments.mplus import answers


@table(
    "papers",
    "memories/books_window8",
    "memories/recall",
    "hmt/smollm2/length",
    "mplus/retention",
    "speed/official_mplus",
)
def papers(
    books: dict[str, Any],
    recall: dict[str, Any],
    length: dict[str, Any],
    retention: dict[str, Any],
    speed: dict[str, Any],
) -> Rows:
    """The claim of each paper, what was measured here, and at what size."""
    claims = {
        MEMORY: "a compressed history lowers perplexity beyond the window",
        "Trellis": "recalls more than DeltaNet and TTT with a state of constant size",
        "Lattice": "writing only what is orthogonal to a slot beats DeltaNet",
        "HMT": "perplexity below a window of equal memory on a pretrained model",
        "M+": "facts stay known longer than with as many bytes on the device and no "
        "store",
    }
    found = {name: _recalled(recall, name) for name in ("Trellis", "Lattice")}
    found |= {MEMORY: _elastic(books), "HMT": _hmt(length)}
    found["M+"] = _mplus(retention, speed)
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


def _recalled(result: dict[str, Any], name: str) -> tuple[str, str]:
    """Recall of the most pairs by a mechanism and DeltaNet, and their sizes."""
    count = max(result["task"]["pairs"])
    found = {
        row["name"]: spread(row["mean"], row["error"], 2)
        for row in result["accuracy"][str(result["task"]["scale"]["context_length"])]
        if row["pairs"] == count
    }
    rows = {row["name"]: row for row in result["rows"]}
    return (
        f"of {count} pairs {found[name]} recalled, DeltaNet {found['DeltaNet']}, with "
        "two copies of each memory in states of equal bytes; at equal width, as in the "
        "paper, not measured",
        f"states of {rows[name]['state_bytes']:,} bytes, DeltaNet's of "
        f"{rows['DeltaNet']['state_bytes']:,}; {rows[name]['parameters']:,} "
        f"parameters, {result['task']['scale']['steps']:,} updates, "
        f"{len(result['config']['seeds'])} seeds",
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


def _mplus(result: dict[str, Any], speed: dict[str, Any]) -> tuple[str, str]:
    found = answers.by_method(result)
    right = {name: number(x["after"][-1]["accuracy"], 2) for name, x in found.items()}
    inject = speed["rounds"][0]["implementations"]["ours"]["inject"]
    return (
        f"right answers {result['distances'][-1]:,} tokens later, with the last of "
        f"three stages trained alone: {right['M+']}, with "
        f"a retriever fitted afterwards {right['M+, retriever fitted afterwards']}; "
        f"the "
        f"backbone tuned on as many updates, windows of its bytes on the device "
        f"{right['window, device, tuned']} and of all its bytes "
        f"{right['window, all, tuned']}, BM25 {right['BM25, tuned']}; injects "
        f"{times(inject['speedup']['official'])} as fast as the authors' program",
        f"SmolLM2-135M, 240 updates, {len(result['facts'])} facts, one seed",
    )
