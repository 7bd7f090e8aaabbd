"""How much does each memory recall, and over what distance, in as many bytes?

    python -m experiments.memories.recall                         # all mechanisms
    python -m experiments.memories.recall --of trellis_ablation   # Trellis, Table 2
    python -m experiments.memories.recall --of lattice_ablation   # Lattice, Table 4
    python -m experiments.memories.recall --of trellis_steps      # defaults of Trellis

Rows: every mechanism with a state of equal bytes; full attention keeps all tokens and
is the ceiling, a sliding window of the same bytes the floor. The ablations have the
papers' variants, from DeltaNet and TTT up, then the choices that the papers leave open:
φ of Trellis, and the chunk of Lattice, whose gradients are stale; two rows of Trellis
have other numbers of slots. Columns: right answers to multi-query recall (`mqar`) by
pairs and by length of the sequence. `trellis_steps` is scored on validation sequences
alone: no test has a say in a default. 30 minutes to an hour on two cores.

It does not show what a language model recalls: models of 31,000 parameters learn
nothing but this task, with two seeds. Language models that a CPU can train are beaten
by counted 4-grams.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tyro

from experiments.lab import study
from experiments.lab.intervals import summarise_seeds
from experiments.lab.results import (
    RESULTS,
    Rows,
    number,
    settings,
    spread,
    table,
    write_report,
)
from experiments.memories import mqar, small_models
from memjax.config_io import to_record
from memjax.mechanisms import TrellisConfig
from memjax.models import ModelConfig
from memjax_kernels import TRELLIS_PHIS

Models = dict[str, ModelConfig]
#: Minutes of one training on two cores.
MINUTES = 1.5
#: Full attention keeps every token, all others as many bytes as DeltaNet.
MODELS: dict[str, str] = {
    "Transformer++": "attention",
    "sliding window": "sliding_window",
    "Linear Attention": "linear_attention",
    "Mamba2": "mamba2",
    "GLA": "gla",
    "DeltaNet": "deltanet",
    "Gated DeltaNet": "gated_deltanet",
    "ABC": "abc",
    "GSA": "gsa",
    "TTT": "ttt_linear",
    "Trellis": "trellis",
    "Lattice": "lattice",
}


BASELINES = ("DeltaNet", "TTT")


def _models(task: mqar.Task, names: Iterable[str] = tuple(MODELS)) -> Models:
    return {name: mqar.model(task, MODELS[name]) for name in names}


def _trellis(task: mqar.Task) -> Models:
    default = mqar.model(task, "trellis")
    (mechanism,) = default.mechanisms
    assert isinstance(mechanism, TrellisConfig)
    variants: dict[str, dict[str, Any]] = {
        "without forget gate": dict(forget=False),
        "f = l2_silu": dict(activation="l2_silu"),
        "f = softmax": dict(activation="softmax"),
        "linear, f = softmax": dict(phi="identity", activation="softmax"),
        "linear, f = ln_silu": dict(phi="identity"),
        "C = 1": dict(chunk_size=1),
    } | {
        f"phi = {phi}": dict(phi=phi)
        for phi in TRELLIS_PHIS
        if phi not in ("identity", TrellisConfig.phi)
    }
    made = {name: mqar.model(task, "trellis", **x) for name, x in variants.items()}
    for name, slots in (("m / 2", mechanism.slots // 2), ("2 m", mechanism.slots * 2)):
        changed = dataclasses.replace(mechanism, slots=slots)
        made[name] = dataclasses.replace(default, mechanisms=(changed,))
    return _models(task, BASELINES) | {"Trellis": default} | made


def _lattice(task: mqar.Task) -> Models:
    variants: dict[str, dict[str, Any]] = {
        "orthogonal recurrence": dict(normalize=False),
        "normalised projection": {},
        "forget gate (l2)": dict(forget="l2"),
        "forget gate (l1)": dict(forget="l1"),
        "ENC": dict(variant="enc"),
        "SIM": dict(variant="sim"),
    } | {f"C = {size}": dict(chunk_size=size) for size in (4, 16, 64)}
    return _models(task, BASELINES) | {
        name: mqar.model(task, "lattice", **{"chunk_size": 1} | options)
        for name, options in variants.items()
    }


def _steps(task: mqar.Task) -> Models:
    def variant(size: int, phi: str, **options: Any) -> ModelConfig:
        return mqar.model(task, "trellis", chunk_size=size, phi=phi, **options)

    bounded = dict(step_size=None)
    free = dict(step_size=None, normalize_target=False)
    return {
        "DeltaNet": mqar.model(task, "deltanet"),
        "C = 64, at most 1/64, l2_silu": variant(64, "l2_silu", step_size=1 / 64),
        "C = 4, bounded, l2_silu": variant(4, "l2_silu", **bounded),
        "C = 16, bounded, l2_silu": variant(16, "l2_silu", **bounded),
        "C = 4, bounded, silu": variant(4, "silu", **bounded),
        "C = 16, bounded, silu": variant(16, "silu", **bounded),
        "C = 4, bounded, silu, targets of any size": variant(4, "silu", **free),
        "C = 16, bounded, silu, targets of any size": variant(16, "silu", **free),
    }


class Study(NamedTuple):
    """A table: its question, the base of differences, rows of a task, rates to try."""

    question: str
    base: str
    models: Callable[[mqar.Task], Models]
    rates: tuple[float, ...] = (1e-2,)


STUDIES = {
    "recall": Study(
        "how much does each memory recall, and over what distance, in as many bytes?",
        "DeltaNet",
        _models,
        (3e-3, 1e-2),
    ),
    "trellis_ablation": Study(
        "what does each part of Trellis bring to recall?", "Trellis", _trellis
    ),
    "lattice_ablation": Study(
        "what does each part of Lattice bring to recall?",
        "normalised projection",
        _lattice,
    ),
    "trellis_steps": Study(
        "which steps, chunks, phi and targets does Trellis learn with?",
        "C = 64, at most 1/64, l2_silu",
        _steps,
    ),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Rows, seeds and tests.

    Attributes:
        of: the study.
        only: names of the rows to run; none is all.
        seeds: of parameters and data order; at least 2, and 3 to claim a difference.
        test_rows: sequences of each test.
        plan: print the missing runs, and stop.
        run_dir: of runs and their numbers.
        output: folder of the result file.
    """

    of: Literal["recall", "trellis_ablation", "lattice_ablation", "trellis_steps"] = (
        "recall"
    )
    only: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1)
    test_rows: int = 64
    plan: bool = False
    run_dir: Path = Path("runs/recall")
    output: Path = RESULTS / "memories"


def models(of: str) -> Models:
    """The rows of a study, with equal parameters."""
    return small_models.equal_parameters(
        STUDIES[of].models(mqar.SMALL), mqar.SMALL.scale
    )


def main(config: Config) -> None:
    """Trains and tests the missing rows, each at a rate of its own, and writes.

    A rate is chosen by the right answers to the validation sequences, with the first
    seed; the tests have no say in it.
    """
    chosen, task, made = STUDIES[config.of], mqar.SMALL, models(config.of)
    names, run_dir = study.selected(config.only, [*made]), config.run_dir / config.of
    if config.plan:
        study.plan(names, config.seeds, run_dir, MINUTES)
        return

    def identity(name: str, seed: int) -> list[Any]:
        model = to_record(made[name])
        return [model, task.scale, seed, chosen.rates, config.test_rows]

    def trained(name: str, rate: float, seed: int) -> dict[str, Any]:
        own = task._replace(scale=task.scale._replace(learning_rate=rate))
        return study.once(
            study.run_folder(run_dir, name, seed) / f"rate{rate:g}.json",
            lambda: mqar.measure(own, made[name], seed, config.test_rows),
            identity(name, seed),
        )

    def measured(name: str, seed: int, folder: Path) -> dict[str, Any]:
        rate = study.choose_rate(
            chosen.rates,
            lambda rate: 1 - trained(name, rate, config.seeds[0])["validation"],
            folder.parent / "rate.json",
            {"steps": task.scale.steps, "seed": config.seeds[0]},
        )["rate"]
        return {
            "learning_rate": rate,
            **trained(name, rate, seed),
            "parameters": small_models.parameters(made[name]),
            "hidden_dim": made[name].hidden_dim,
            "state_bytes": small_models.state_bytes(made[name]),
        }

    def report(rows: list[dict[str, Any]]) -> None:
        accuracy: Any = {
            str(n): mqar.summarise(rows, chosen.base, n) for n in task.lengths
        }
        if config.of != "recall":
            accuracy = accuracy[str(task.scale.context_length)]
        found = {"accuracy": accuracy}
        if config.of == "trellis_steps":
            found = {"validation": summarise_seeds(rows, "validation", chosen.base)}
        results = {
            "task": task._asdict() | {"scale": task.scale._asdict()},
            "base": chosen.base,
            **found,
            "rows": rows,
        }
        output = config.output / config.of
        write_report(output, chosen.question, settings(config), results)

    study.run_all(
        names, config.seeds, measured, run_dir=run_dir, identity=identity, report=report
    )
    print(f"wrote {config.output / config.of}.json: python -m experiments.lab.render")


def _by_pairs(summary: list[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Mean and standard error over seeds by model and number of pairs."""
    found: dict[str, dict[str, str]] = {}
    for row in sorted(summary, key=lambda row: row["pairs"]):
        cell = spread(row["mean"], row["error"], 2)
        found.setdefault(row["name"], {})[f"{row['pairs']} pairs"] = cell
    return found


@table("memories/recall")
def by_pairs(result: Mapping[str, Any]) -> Rows:
    """Right answers by pairs, at a length with room for all of them."""
    found = _by_pairs(result["accuracy"][str(result["task"]["lengths"][1])])
    for name, run in {row["name"]: row for row in result["rows"]}.items():
        yield {
            "right answers": name,
            "state bytes": number(run["state_bytes"], 0),
            "learning rate": f"{run['learning_rate']:g}",
        } | found[name]


@table("memories/recall_length", "memories/recall")
def by_length(result: Mapping[str, Any]) -> Rows:
    """Right answers by the length of the sequence, at a few pairs."""
    pairs, lengths = f"{result['task']['pairs'][1]} pairs", result["task"]["lengths"]
    found = {n: _by_pairs(result["accuracy"][str(n)]) for n in lengths}
    for name in dict.fromkeys(row["name"] for row in result["rows"]):
        yield {f"right answers, {pairs}": name} | {
            f"{n:,} tokens": found[n][name][pairs] for n in lengths
        }


def _ablation(result: Mapping[str, Any]) -> Rows:
    found = _by_pairs(result["accuracy"])
    for name in dict.fromkeys(row["name"] for row in result["accuracy"]):
        yield {"right answers": name} | found[name]


trellis = table("memories/trellis_ablation")(_ablation)
lattice = table("memories/lattice_ablation")(_ablation)


@table("memories/trellis_steps")
def steps(result: Mapping[str, Any]) -> Rows:
    """Recall of validation sequences, and perplexities of an earlier program."""
    perplexity = {row["name"]: row for row in result.get("perplexity", ())}
    for row in result["validation"]:
        cells = {"validation data": row["name"]}
        cells |= {"right answers": spread(row["mean"], row["error"], 2)}
        if found := perplexity.get(row["name"]):
            cells["PPL per byte"] = spread(found["mean"], found["error"], 2)
        yield cells
    for name, value in result.get("ngrams", {}).items():
        yield {"validation data": name, "PPL per byte": number(value, 2)}
    if perplexity:
        yield "perplexities by a program whose last commit is 224480a"


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
