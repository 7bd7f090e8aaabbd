"""Trains and tests everything for the table of knowledge retention, one call for all.

    python -m experiments.mplus.retention.everything --run-dir runs/retention

For each seed: M+; a MemoryLLM that is trained itself, for as many updates; the backbone
on the same lessons at every learning rate, of which the validation facts choose one.
Then all rows, without adapters and with them. Every step is a command of its own, which
is printed before it runs and goes on where it was if it was stopped: so does this one.
"""

import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import tyro

from experiments.lab import backbones
from experiments.lab.results import RESULTS
from experiments.mplus.retention import recorded
from memjax.checks import check_positive, check_seed, check_sizes

RETENTION, TUNING = "experiments.mplus.retention", "experiments.mplus.adapters"


@dataclasses.dataclass(frozen=True)
class Config:
    """What is trained and tested.

    Attributes:
        run_dir: where models are kept.
        seeds: of the trainings.
        learning_rates: of the adapters; the better one is taken.
        updates: of M+, of MemoryLLM and of the adapters.
        samples: facts that are asked.
        dry: print the commands that are known beforehand, and run none.
        output: of the rows, without the ending; choices lie beside it.
    """

    run_dir: Path = Path("runs/retention")
    seeds: tuple[int, ...] = (42, 43)
    learning_rates: tuple[float, ...] = (3e-4, 1e-3)
    updates: int = 240
    samples: int = 96
    dry: bool = False
    output: Path = RESULTS / "mplus" / "retention"

    def __post_init__(self):
        for seed in self.seeds:
            check_seed(seed)
        for rate in self.learning_rates:
            check_positive(learning_rates=rate)
        check_sizes(
            updates=self.updates,
            samples=self.samples,
            seeds=len(self.seeds),
            learning_rates=len(self.learning_rates),
        )


class Folders(NamedTuple):
    """Where the models of a seed are."""

    mplus: Path
    memoryllm: Path
    tuned: tuple[Path, ...]


def main(config: Config) -> None:
    """Runs all commands in order."""
    for seed in config.seeds:
        folders = folders_of(config, seed)
        for command in trainings(config, seed, folders):
            run(command, config.dry)
        for i, folder in enumerate(folders.tuned):
            run(validation(config, folder, chosen_by(config, seed, i)), config.dry)
        tuned = folders.tuned[0 if config.dry else best(config, seed)]
        for command in tests(config, folders, tuned):
            run(command, config.dry)


def folders_of(config: Config, seed: int) -> Folders:
    """The folders of one seed."""
    at = lambda name: config.run_dir / f"{name}-{seed}"
    return Folders(
        at("mplus"),
        at("memoryllm"),
        tuple(at(f"tuned-{rate:g}") for rate in config.learning_rates),
    )


def trainings(config: Config, seed: int, folders: Folders) -> list[list[str]]:
    """M+ and MemoryLLM by `memjax finetune`, the adapters by `tuning`."""
    shared = [f"--seed={seed}", f"--loop.steps={config.updates}"]
    finetune = lambda preset, folder: [
        "memjax.cli.entry",
        "finetune",
        preset,
        f"--backbone={backbones.smollm2()}",
        f"--run-dir={folder}",
        *shared,
    ]
    # Stage 2 is MemoryLLM on the same lessons; no stage before it, as with M+.
    found = [
        finetune("mplus-smollm2-135m-stage3", folders.mplus),
        finetune("mplus-smollm2-135m-stage2", folders.memoryllm),
    ]
    for rate, folder in zip(config.learning_rates, folders.tuned, strict=True):
        found.append(
            [
                TUNING,
                f"--run-dir={folder}",
                f"--learning-rate={rate:g}",
                f"--seed={seed}",
                f"--updates={config.updates}",
            ]
        )
    return found


def chosen_by(config: Config, seed: int, i: int) -> Path:
    """The validation result of a learning rate, without the ending."""
    rate = config.learning_rates[i]
    return config.output.parent / "validation" / f"tuned_{rate:g}_{seed}"


def validation(config: Config, tuned: Path, output: Path) -> list[str]:
    """Asks full attention, near and far, facts of subjects that are trained on."""
    return [
        f"{RETENTION}.knowledge_retention",
        f"--tuned={tuned}",
        "--split=validation",
        "--samples=24",
        "--after",
        "0",
        "4",
        "--methods",
        "full attention",
        f"--output={output}",
    ]


def best(config: Config, seed: int) -> int:
    """Which learning rate has most right answers; the lower one of equals."""
    right = []
    for i in range(len(config.learning_rates)):
        file = Path(f"{chosen_by(config, seed, i)}.json")
        (row,) = recorded.by_method(json.loads(file.read_text("utf-8"))).values()
        right.append(sum(found["accuracy"] for found in row["after"]))
    rates = config.learning_rates
    return max(range(len(rates)), key=lambda i: (right[i], -rates[i]))


def tests(config: Config, folders: Folders, tuned: Path) -> list[list[str]]:
    """All rows: with memories and without adapters, then with them."""
    ask = [
        f"{RETENTION}.knowledge_retention",
        f"--samples={config.samples}",
        f"--output={config.output}",
    ]
    memories = [f"--model={folders.mplus}", f"--memoryllm={folders.memoryllm}"]
    return [[*ask, *memories], [*ask, f"--tuned={tuned}"]]


def run(command: list[str], dry: bool) -> None:
    """Prints a command, and runs it unless it is dry.

    Raises:
        SystemExit: with its code, if it does not end with 0.
    """
    print(shlex.join(["python", "-m", *command]), flush=True)
    if dry:
        return
    # A process each: it gives its memory back.
    code = subprocess.run([sys.executable, "-m", *command], check=False).returncode
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    main(tyro.cli(Config))
