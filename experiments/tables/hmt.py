"""Tables of the experiments with HMT."""

from typing import Any

from experiments.hmt.rows import SINK_WINDOW, TUNED
from experiments.lab.intervals import format_interval, format_seeds
from experiments.tables.table import (
    Table,
    Tables,
    load,
    number,
    percent,
    thousands,
)


def _lengths(name: str) -> Table:
    """Perplexity by row and length of the input."""
    result = load(name)
    rows = []
    for model, values in result["perplexity"]["all"].items():
        facts = result["models"][model]
        rows.append(
            [
                model,
                number(facts["state_bytes"], 0),
                number(facts["reads"], 2),
                _training(facts),
                *(number(value, 2) for value in values),
            ]
        )
    rows += [[name, *[""] * (len(rows[0]) - 1)] for name in _missing(result)]
    columns = [f"{thousands(n)} tokens" for n in result["lengths"]]
    header = ["PPL", "bytes kept", "tokens read for one", "training", *columns]
    return Table(header, rows, [name])


def _training(facts: dict[str, Any]) -> str:
    if "learning_rate" not in facts:
        return "none"
    seeds = facts["seeds"]
    return f"rate {facts['learning_rate']:g}, {seeds} seed{'s' * (seeds > 1)}"


def _missing(result: dict[str, Any]) -> list[str]:
    return [f"{name} (not run yet)" for name in result["missing"]]


def smollm2_length() -> Table:
    """SmolLM2-135M."""
    return _lengths("hmt/smollm2/length")


def _gains(name: str) -> Table:
    """Of each row over the tuned window, at the longest input that both read."""
    result, base = load(name), TUNED.format(SINK_WINDOW)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for gain in result["gains"]:
        if gain["base"] == base:
            # The longest comes last.
            found.setdefault(gain["model"], {})[gain["kind"]] = gain
    kinds = list(result["perplexity"])
    rows = [
        [
            model,
            thousands(by["all"]["length"]),
            *(format_interval(by[kind]) for kind in kinds),
        ]
        for model, by in found.items()
    ]
    header = [f"nats saved a token over the {base}", "tokens", *kinds]
    return Table(header, rows, [name])


def smollm2_gain() -> Table:
    """SmolLM2-135M."""
    return _gains("hmt/smollm2/length")


def ablations() -> Table:
    """Sizes of the sensory memory, and segments that gradients flow through."""
    rows = []
    for result in map(load, ("hmt/sensory", "hmt/depth")):
        for case, row in result["models"].items():
            cells = [case, number(row["perplexity"]["causal"], 1)]
            if case == result["base"]:
                rows.append([*cells, "", "", ""])
                continue
            seeds = format_seeds(row["gain_by_seed"])
            rows.append([*cells, result["base"], format_interval(row["gain"]), seeds])
    header = ["", "PPL, causal", "against", "loss reduction, nats/token"]
    return Table([*header, "with each seed"], rows, ["hmt/sensory", "hmt/depth"])


def qa() -> Table:
    """Right answers and perplexity of answers."""
    result = load("hmt/questions")
    rows = []
    for model in result["models"]:
        found = [by["models"][model]["all"] for by in result["contexts"].values()]
        exact = [percent(x["exact"]) for x in found]
        rows.append([model, *exact, *(number(x["perplexity"], 1) for x in found)])
    guess = percent(result["majority_exact"]["all"])
    tests = len(result["contexts"])
    rows.append(["most frequent answer of its kind", *[guess] * tests, *[""] * tests])
    counts = list(result["contexts"])
    header = ["", *(f"right, {n} contexts" for n in counts)]
    header += [f"PPL of the answer, {n}" for n in counts]
    return Table(header, rows, ["hmt/questions"])


TABLES: Tables = {
    "hmt/smollm2_length": smollm2_length,
    "hmt/smollm2_gain": smollm2_gain,
    "hmt/ablations": ablations,
    "hmt/questions": qa,
}
