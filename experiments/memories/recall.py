"""How much does each memory recall, and over what distance, in as many bytes?

    python -m experiments.memories.recall

Every mechanism learns multi-query recall (`mqar`) with a state of equal bytes; full
attention, which keeps all tokens, is the ceiling, and a sliding window of the same
bytes the floor. Each learning rate is tried with the first seed. The one with most
right answers to the validation sequences trains the model with all seeds, and those are
tested on other sequences.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

from experiments.lab.results import RESULTS, figure
from experiments.memories import cases as study
from experiments.memories import mqar, seed_report
from experiments.memories import small_models as comparison
from experiments.memories.cases import Case

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
    """See `mqar.Config`.

    Attributes:
        learning_rates: tried for every model.
    """

    learning_rates: tuple[float, ...] = (3e-3, 1e-2)
    run_dir: Path = Path("runs/recall")
    output: Path = RESULTS / "memories" / "recall"


def cases(config: Config) -> list[Case]:
    """Every model with every learning rate."""
    task = config.task
    models = comparison.equal_parameters(
        {name: mqar.model(task, mechanism) for name, mechanism in MODELS.items()},
        task.scale,
    )
    return [
        Case(name, model, {"learning_rate": rate})
        for name, model in models.items()
        for rate in config.learning_rates
    ]


def main(config: Config) -> None:
    """Trains what is not trained yet, prints and writes the results."""
    run_of = functools.partial(mqar.settings, config)
    measure = functools.partial(mqar.measure, config)
    everything, first = cases(config), config.seeds[:1]
    tried = study.run_all(config, everything, run_of, measure, seeds=first)
    chosen = best(everything, tried)
    rows = study.run_all(
        *(config, chosen, run_of, measure),
        lambda rows: report(config, tried, rows),
    )
    for length, summary in summaries(rows).items():
        title = f"Recall in {length} tokens"
        seed_report.show(title, summary, mqar.BASE, columns=("pairs", "name"))


def best(cases: Sequence[Case], tried: Sequence[Mapping[str, Any]]) -> list[Case]:
    """Each model's case of the learning rate with most right validation answers."""
    found: dict[str, Mapping[str, Any]] = {}
    for row in tried:
        if row["name"] not in found or (
            row["validation"] > found[row["name"]]["validation"]
        ):
            found[row["name"]] = row
    return [
        case
        for case in cases
        if case.name in found
        and case.fields["learning_rate"] == found[case.name]["learning_rate"]
    ]


def summaries(rows: list[dict]) -> dict[int, list[dict]]:
    """Share of right answers by model and pairs, for each length of the tests."""
    lengths = sorted({score["length"] for score in rows[0]["scores"]})
    return {n: mqar.summarise(rows, mqar.BASE, n) for n in lengths}


def report(config: Config, tried: list[dict], rows: list[dict]) -> None:
    """Writes what there is."""
    result = seed_report.write(
        config,
        "how much does each memory recall, and over what distance, in as many bytes?",
        rows,
        task=config.task._asdict() | {"scale": config.task.scale._asdict()},
        tried=[
            {k: row[k] for k in ("name", "learning_rate", "validation")}
            for row in tried
        ],
        accuracy={str(n): summary for n, summary in summaries(rows).items()},
    )
    plot(result, Path(f"{config.output}.png"))


@figure("memories/recall")
def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draws right answers against the pairs of a sequence, one panel a length."""
    panels = {f"{n} tokens": rows for n, rows in result["accuracy"].items()}
    labels = ("key-value pairs", "right answers")
    seed_report.plot_lines(result, path, panels, "pairs", labels)


if __name__ == "__main__":
    main(tyro.cli(Config))
