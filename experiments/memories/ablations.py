"""What does each part of Trellis and of Lattice bring, and which steps learn?

    python -m experiments.memories.ablations --of trellis    # Trellis, Table 2
    python -m experiments.memories.ablations --of lattice    # Lattice, Table 4
    python -m experiments.memories.ablations --of steps      # defaults of Trellis

Rows: the papers' variants, from DeltaNet and TTT up, then the choices that the papers
leave open: φ of Trellis, and the chunk of Lattice, whose gradients are stale. Columns:
right answers to multi-query recall (`mqar`) by pairs, and the paper's perplexity with
125M parameters. States are of equal bytes, but for two rows of Trellis with other
numbers of slots. `steps` is scored on validation sequences alone: no test has a say in
a default. 30 to 40 minutes each on two cores.

It does not show the perplexity of language models: those that a CPU can train are
beaten by counted 4-grams.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tyro

from experiments.lab.intervals import summarise_seeds
from experiments.lab.results import RESULTS, Rows, number, spread, table
from experiments.memories import mqar, small_models
from experiments.memories.recall import cells
from memjax.mechanisms import TrellisConfig
from memjax.models import ModelConfig
from memjax_kernels import TRELLIS_PHIS

#: Models by row, of a task.
Make = Callable[[mqar.Task], Mapping[str, ModelConfig]]


class Ablation(NamedTuple):
    """One study.

    Attributes:
        question: that its result answers.
        base: the row that others are compared with.
        models: its rows.
        paper: perplexities of the paper with 125M parameters on The Pile.
    """

    question: str
    base: str
    models: Make
    paper: Mapping[str, float] = {}


def _trellis(task: mqar.Task) -> dict[str, ModelConfig]:
    default = mqar.model(task, "trellis")
    (mechanism,) = default.mechanisms
    assert isinstance(mechanism, TrellisConfig)

    def variant(**options: Any) -> ModelConfig:
        return mqar.model(task, "trellis", **options)

    def with_slots(slots: int) -> ModelConfig:
        changed = dataclasses.replace(mechanism, slots=slots)
        return dataclasses.replace(default, mechanisms=(changed,))

    return {
        "DeltaNet": mqar.model(task, "deltanet"),
        "TTT": mqar.model(task, "ttt_linear"),
        "Trellis": default,
        "without forget gate": variant(forget=False),
        "f = l2_silu": variant(activation="l2_silu"),
        "f = softmax": variant(activation="softmax"),
        "linear, f = softmax": variant(phi="identity", activation="softmax"),
        "linear, f = ln_silu": variant(phi="identity"),
        "m / 2": with_slots(mechanism.slots // 2),
        "2 m": with_slots(mechanism.slots * 2),
        "C = 1": variant(chunk_size=1),
    } | {
        f"phi = {phi}": variant(phi=phi)
        for phi in TRELLIS_PHIS
        if phi not in ("identity", TrellisConfig.phi)
    }


def _lattice(task: mqar.Task) -> dict[str, ModelConfig]:
    def variant(chunk_size: int = 1, **options: Any) -> ModelConfig:
        return mqar.model(task, "lattice", chunk_size=chunk_size, **options)

    return {
        "DeltaNet": mqar.model(task, "deltanet"),
        "TTT": mqar.model(task, "ttt_linear"),
        "orthogonal recurrence": variant(normalize=False),
        "normalised projection": variant(),
        "forget gate (l2)": variant(forget="l2"),
        "forget gate (l1)": variant(forget="l1"),
        "ENC": variant(variant="enc"),
        "SIM": variant(variant="sim"),
    } | {f"C = {size}": variant(size) for size in (4, 16, 64)}


def _steps(task: mqar.Task) -> dict[str, ModelConfig]:
    def variant(size: int, step: float | None, phi: str, **others: Any) -> ModelConfig:
        options = {"chunk_size": size, "step_size": step, "phi": phi} | others
        return mqar.model(task, "trellis", **options)

    free = {"normalize_target": False}
    return {
        "DeltaNet": mqar.model(task, "deltanet"),
        "C = 64, at most 1/64, l2_silu": variant(64, 1 / 64, "l2_silu"),
        "C = 64, at most 1, l2_silu": variant(64, 1.0, "l2_silu"),
        "C = 16, at most 1, l2_silu": variant(16, 1.0, "l2_silu"),
        "C = 4, at most 1, l2_silu": variant(4, 1.0, "l2_silu"),
        "C = 4, bounded, l2_silu": variant(4, None, "l2_silu"),
        "C = 16, bounded, l2_silu": variant(16, None, "l2_silu"),
        "C = 4, bounded, silu": variant(4, None, "silu"),
        "C = 16, bounded, silu": variant(16, None, "silu"),
        "C = 4, bounded, silu, targets of any size": variant(4, None, "silu", **free),
        "C = 16, bounded, silu, targets of any size": variant(16, None, "silu", **free),
    }


ABLATIONS = {
    "trellis": Ablation(
        "what does each part of Trellis bring to recall?",
        "Trellis",
        _trellis,
        {
            "DeltaNet": 11.58,
            "TTT": 11.44,
            "Trellis": 10.87,
            "without forget gate": 11.28,
            "f = l2_silu": 10.98,
            "f = softmax": 11.29,
            "linear, f = softmax": 12.71,
            "linear, f = ln_silu": 11.65,
            "m / 2": 11.14,
            "2 m": 10.87,
            "C = 1": 10.75,
        },
    ),
    "lattice": Ablation(
        "what does each part of Lattice bring to recall?",
        "normalised projection",
        _lattice,
        {
            "DeltaNet": 11.62,
            "TTT": 11.59,
            "orthogonal recurrence": 11.26,
            "normalised projection": 10.94,
            "forget gate (l2)": 10.94,
            "ENC": 10.90,
            "SIM": 10.89,
        },
    ),
    "steps": Ablation(
        "which steps, chunks, phi and targets does Trellis learn with?",
        "C = 64, at most 1/64, l2_silu",
        _steps,
    ),
}


@dataclasses.dataclass(frozen=True)
class Config(mqar.Config):
    """See `mqar.Config`.

    Attributes:
        of: the study.
    """

    of: Literal["trellis", "lattice", "steps"] = "trellis"
    run_dir: Path = Path("runs/ablations")
    output: Path = RESULTS / "memories"


def models(config: Config) -> dict[str, ModelConfig]:
    """The rows, with equal parameters."""
    made = ABLATIONS[config.of].models(config.task)
    return small_models.equal_parameters(made, config.task.scale)


def main(config: Config) -> None:
    """Trains the missing rows, prints and writes the results."""
    ablation = ABLATIONS[config.of]
    name = "trellis_steps" if config.of == "steps" else f"{config.of}_ablation"
    placed = dataclasses.replace(
        config, run_dir=config.run_dir / config.of, output=config.output / name
    )
    length = config.task.scale.context_length

    def report(rows: list[dict[str, Any]]) -> None:
        results: dict[str, Any] = {"base": ablation.base, "paper": {**ablation.paper}}
        if config.of == "steps":
            found = summarise_seeds(rows, "validation", ablation.base)
            results = {"validation": found}
        else:
            results["accuracy"] = mqar.summarise(rows, ablation.base, length)
        mqar.write(placed, ablation.question, rows, **results)

    rows = mqar.run_study(placed, models(config), report)
    mqar.show_summary(ablation.question, mqar.summarise(rows, ablation.base, length))


def _rows(result: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Right answers of every variant by pairs, and its perplexity in the paper."""
    summary = result["accuracy"]
    pairs, found = sorted({row["pairs"] for row in summary}), cells(summary)
    for name in dict.fromkeys(row["name"] for row in summary):
        yield (
            {"right answers": name}
            | {f"{count} pairs": found.get((name, count), "") for count in pairs}
            | {"PPL in the paper, 125M": number(result["paper"].get(name), 2)}
        )


@table("memories/trellis_ablation")
def trellis(result: Mapping[str, Any]) -> Rows:
    """The parts of Trellis."""
    yield from _rows(result)


@table("memories/lattice_ablation")
def lattice(result: Mapping[str, Any]) -> Rows:
    """The parts of Lattice."""
    yield from _rows(result)


@table("memories/trellis_steps")
def steps(result: Mapping[str, Any]) -> Rows:
    """Recall of validation sequences, and the perplexities of the first run."""
    text = {row["name"]: row for row in result.get("perplexity", ())}
    for row in result["validation"]:
        cells = {"right answers": spread(row["mean"], row["error"], 2)}
        if text:
            found = text[row["name"]]
            cells["PPL per byte"] = spread(found["mean"], found["error"], 2)
        yield {"validation data": row["name"]} | cells
    for name, value in result.get("ngrams", {}).items():
        yield {"validation data": name, "PPL per byte": number(value, 2)}
    if text:
        yield "perplexities by a program whose last commit is 224480a"


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
