"""How much does each memory recall, and over what distance, in as many bytes?

    python -m experiments.memories.recall
    python -m experiments.memories.recall --plan

Rows: every mechanism with a state of equal bytes. Full attention keeps all tokens and
is the ceiling; a sliding window of the same bytes is the floor. Columns: right answers
to multi-query recall (`mqar`) by pairs, and by length of the sequence. An hour on two
cores.

It does not show what a language model recalls: models of 31,000 parameters learn
nothing but this task, with two seeds.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tyro

from experiments.lab.results import RESULTS, Rows, number, spread, table
from experiments.memories import mqar, small_models
from memjax.models import ModelConfig

QUESTION = "how much does each memory recall, and over what distance, in as many bytes?"
#: Full attention keeps every token, all others as many bytes as DeltaNet.
MODELS: dict[str, str] = {
    "Transformer++": "attention",
    "sliding window": "sliding_window",
    "Linear Attention": "linear_attention",
    "Mamba2": "mamba2",
    "GLA": "gla",
    mqar.BASE: "deltanet",
    "Gated DeltaNet": "gated_deltanet",
    "ABC": "abc",
    "GSA": "gsa",
    "TTT": "ttt_linear",
    "Trellis": "trellis",
    "Lattice": "lattice",
}


@dataclasses.dataclass(frozen=True)
class Config(mqar.Config):
    """See `mqar.Config`."""

    rates: tuple[float, ...] = (3e-3, 1e-2)
    output: Path = RESULTS / "memories" / "recall"


def models(config: Config) -> dict[str, ModelConfig]:
    """The rows, with equal parameters."""
    task = config.task
    made = {name: mqar.model(task, mechanism) for name, mechanism in MODELS.items()}
    return small_models.equal_parameters(made, task.scale)


def main(config: Config) -> None:
    """Trains the missing rows, prints and writes the results."""

    def report(rows: list[dict[str, Any]]) -> None:
        accuracy = {str(n): found for n, found in summaries(rows).items()}
        mqar.write(config, QUESTION, rows, accuracy=accuracy)

    rows = mqar.run_study(config, models(config), report)
    for length, summary in summaries(rows).items():
        mqar.show_summary(f"Recall in {length} tokens", summary)


def summaries(rows: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Share of right answers by model and pairs, for each length of the tests."""
    lengths = sorted({score["length"] for row in rows for score in row["scores"]})
    return {n: mqar.summarise(rows, mqar.BASE, n) for n in lengths}


def cells(summary: list[Mapping[str, Any]], digits: int = 2) -> dict[tuple, str]:
    """Mean and standard error over seeds by model and number of pairs."""
    return {
        (row["name"], row["pairs"]): spread(row["mean"], row["error"], digits)
        for row in summary
    }


@table("memories/recall")
def by_pairs(result: Mapping[str, Any]) -> Rows:
    """Right answers by pairs, at a length with room for all of them."""
    summary = result["accuracy"][str(result["task"]["lengths"][1])]
    pairs, found = sorted({row["pairs"] for row in summary}), cells(summary)
    for name, run in {row["name"]: row for row in result["rows"]}.items():
        yield {
            "right answers": name,
            "state bytes": number(run["state_bytes"], 0),
            "learning rate": f"{run['learning_rate']:g}",
        } | {f"{count} pairs": found[name, count] for count in pairs}


@table("memories/recall_length", "memories/recall")
def by_length(result: Mapping[str, Any]) -> Rows:
    """Right answers by the length of the sequence, at a few pairs."""
    count, lengths = result["task"]["pairs"][1], result["task"]["lengths"]
    found = {n: cells(result["accuracy"][str(n)]) for n in lengths}
    for name in dict.fromkeys(row["name"] for row in result["rows"]):
        yield {f"right answers, {count} pairs": name} | {
            f"{n:,} tokens": found[n][name, count] for n in lengths
        }


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
