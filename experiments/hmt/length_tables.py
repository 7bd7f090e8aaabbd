"""Tables and plot of perplexity by the length of the input."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.hmt.rows import AGAIN, CAUSAL, FULL, HIERARCHICAL, SINK_WINDOW, TUNED
from experiments.lab.intervals import format_interval
from experiments.lab.results import Rows, Table, figure, number, table
from memjax.evaluation import plots
from memjax.evaluation.drawing import source_of

TUNED_WINDOW = TUNED.format(SINK_WINDOW)
#: The lines of the plot.
PLOTTED = (CAUSAL, HIERARCHICAL, TUNED_WINDOW, TUNED.format(AGAIN), FULL, SINK_WINDOW)


@figure("hmt/smollm2/length")
def plot(result: dict[str, Any], path: Path) -> None:
    """Draws the perplexities of some rows."""
    found = result["perplexity"]["all"]
    curves = {
        name: [np.nan if value is None else value for value in found[name]]
        for name in PLOTTED
        if name in found
    }
    start = result["scored_from"]
    title = f"Held-out documents, targets from {start} on in each segment"
    plots.perplexity_by_length(
        curves, result["lengths"], path, title=title, source=source_of(result)
    )


@table("hmt/length", "hmt/smollm2/length")
def length(result: dict[str, Any]) -> Rows:
    """Perplexity by row and length of the input."""
    for name, values in result["perplexity"]["all"].items():
        facts = result["models"][name]
        trained = "none"
        if "learning_rate" in facts:
            seeds = facts["seeds"]
            trained = f"rate {facts['learning_rate']:g}, {seeds} seed{'s'[: seeds > 1]}"
            if "targets" in facts:
                trained += f", {facts['targets']:,} targets"
        cells = {
            "PPL": name,
            "state, bytes": number(facts["state_bytes"], 0),
            "tokens read for one": number(facts["reads"], 2),
            "training": trained,
        }
        for tokens, value in zip(result["lengths"], values, strict=True):
            cells[f"{number(tokens, 0)} tokens"] = number(value, 2)
        yield cells
    for name, by in result.get("curve", {}).items():
        found = (f"{number(x, 2)} after {int(n):,}" for n, x in by.items())
        yield f"{name}, one seed, PPL by scored targets: {', '.join(found)}"
    if missing := result["missing"]:
        yield f"not run yet: {', '.join(missing)}"


@table("hmt/length_difference", "hmt/smollm2/length")
def length_difference(result: dict[str, Any]) -> Rows:
    """Loss of the tuned window minus each row's, at the longest input of both."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for gain in result["gains"]:
        if gain["base"] == TUNED_WINDOW:
            # The longest comes last.
            found.setdefault(gain["model"], {})[gain["kind"]] = gain
    for name, by in found.items():
        cells = {f"nats/token below the {TUNED_WINDOW}": name}
        cells["tokens"] = number(by["all"]["length"], 0)
        yield cells | {kind: format_interval(x) for kind, x in by.items()}


#: The same of rows with equal targets.
EQUAL = ("hmt/smollm2/length_equal",)
length_equal = Table("hmt/length_equal", EQUAL, length.rows)
equal_difference = Table("hmt/equal_difference", EQUAL, length_difference.rows)
equal_plot = figure(*EQUAL)(plot.draw)
