"""Tables of recall, and the rows of a study that are complete."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.lab.intervals import against_paper, median_and_range
from experiments.lab.results import Rows, number, table

#: Accuracy on the fewest pairs from which on a model has learned the task: twice the
#: rate of a guess among the values shown.
LEARNED = 0.5
#: Training contexts, and Trellis's table 4 at contexts of Books four times as long.
LENGTHS = (128, 256, 512, 1024, 2048)
PAPER = {
    "Trellis": (19.09, 17.92, 17.19, 16.71, 16.56),
    "Gated DeltaNet": (19.71, 18.62, 17.85, 17.48, 17.40),
    "TTT": (19.91, 18.78, 18.19, 18.03, 18.54),
    "Mamba2": (19.96, 18.89, 18.19, 18.07, 18.23),
    "DeltaNet": (20.21, 19.21, 18.44, 17.90, 18.05),
    "Linear Attention": (20.84, 19.96, 19.60, 19.64, 20.34),
    "Transformer++": (20.60, 19.39, 18.89, 18.38, 18.85),
}


def complete(result: Mapping[str, Any], length: int, counts: Sequence[int]) -> Rows:
    """Rows of a mechanism: width, bytes, seeds that learned, and what those answer.

    Of a study that was stopped those rows that all of its seeds have finished.
    """
    found: dict[str, dict[tuple[str, str], list[Mapping[str, Any]]]] = {}
    for run in result["rows"]:
        of = found.setdefault(run["name"], {})
        of.setdefault((run["column"], run["task"]), []).append(run)
    has_text = any(run["task"] == "text" for run in result["rows"])
    columns = dict.fromkeys(run["column"] for run in result["rows"])
    order = itertools.product(found, columns)
    for name, column in order:
        of = found[name]
        if column not in {known for known, _ in of}:
            continue
        runs = of.get((column, "recall"), [])
        learned = [x for x in runs if x.get("validation", (0,))[0] >= LEARNED]
        cells = {"right answers": name, "equal": column}
        for field in ("width", "state_bytes"):
            cells[field.replace("_", " ")] = number(runs[0][field], 0) if runs else ""
        cells["learned"] = f"{len(learned)} of {len(runs)}" if runs else "not trained"
        for count in counts:
            values = [score(x, count, length) for x in learned]
            cells[f"{count} pairs"] = median_and_range(values)
        if has_text:
            values = [x.get("perplexity") for x in of.get((column, "text"), [])]
            known = [x for x in values if x is not None]
            cells["PPL per byte"] = median_and_range(known)
        yield cells
    yield f"median (range) of the seeds that learned, in sequences of {length} tokens"
    for order, value in result.get("ngrams", {}).items():
        yield f"PPL of {order}s {number(value, 2)}"


def score(run: Mapping[str, Any], pairs: int, length: int) -> float:
    """Right answers of a run's test of that many pairs, in sequences of that length."""
    (found,) = (
        x["tokens"]
        for x in run["scores"]
        if (x["pairs"], x["length"]) == (pairs, length)
    )
    return found


@table("memories/trellis_perplexity", "memories/trellis_steps")
def perplexity(result: Mapping[str, Any]) -> Rows:
    """Perplexities of memories of one width, by an earlier program."""
    for row in result["perplexity"]:
        found = f"{row['mean']:.2f} ± {row['error']:.2f}"
        yield {"validation data": row["name"], "PPL per byte": found}
    for name, value in result["ngrams"].items():
        yield {"validation data": name, "PPL per byte": number(value, 2)}
    yield "by a program whose last commit is 224480a"


@table("memories/columns", "memories/columns/recall")
def both_columns(result: Mapping[str, Any]) -> Rows:
    """Recall at equal width and in equal bytes, at a length with room for all pairs."""
    task = result["task"]
    return complete(result, task["lengths"][1], task["tested"][-3:])


@table("memories/contexts", "memories/columns/contexts")
def by_context(result: Mapping[str, Any]) -> Rows:
    """Perplexity by training context and FLOPs, beside Trellis's paper."""
    found: dict[tuple[int, int], dict[str, list[Mapping[str, Any]]]] = {}
    for run in result["rows"]:
        size = (run["context"], run["model_width"])
        found.setdefault(size, {}).setdefault(run["name"], []).append(run)
    for (context, width), rows in found.items():
        ours, paper = {}, {}
        for name, runs in rows.items():
            ours[name] = [x["perplexity"] for x in runs if "perplexity" in x]
            known = width == result["text"]["model_dim"] and name in PAPER
            figure = PAPER[name][LENGTHS.index(context)] if known else None
            if name in PAPER:
                # Of other widths the paper has a picture, in which Trellis is lowest.
                paper[name] = figure or float(name != "Trellis")
            yield {
                "PPL per byte": name,
                "context": f"{context}",
                "width of the model": f"{width}",
                "training, TFLOP": number(runs[0]["tera_flops"], 1),
                "PPL": median_and_range(ours[name]),
                "PPL of the paper": number(figure, 2),
            }
        order = against_paper(paper, {name: ours[name] for name in paper})
        yield f"context of {context}, width of {width}: {order}"
