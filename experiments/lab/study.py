"""The protocol of every study: rows x learning rates x seeds, resumed after a stop.

A run is one row with one seed. Its numbers are stored in the run folder with the
settings that they depend on, and the result file is written again after each run. The
learning rate of a row is chosen on validation data (`climb_rate`) before test data is
read. `show_plan` prints the missing runs with their cost, and nothing is trained.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.lab.results import read_object
from memjax.buckets.writing import write_atomically
from memjax.status import say
from memjax.training import Outcome

#: In the folder of a training its cost so far, in that of a run its numbers.
SPENT, SCORE = "spent.json", "score.json"
#: A row and its seed.
Run = tuple[str, int]


def digest(record: Any) -> str:
    """A short name of settings, the same for equal ones."""
    text = json.dumps(record, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def use_compile_cache(run_dir: Path) -> None:
    """Stores compiled programs in the run folder, unless there is a cache."""
    if not jax.config.values["jax_compilation_cache_dir"]:
        cache = run_dir.resolve() / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(cache))


def once(file: Path, measure: Callable[[], Any], identity: Any = None) -> Any:
    """The JSON value of a file, measured and written if the file is missing.

    `identity` has the settings that the value depends on.
    """
    # As JSON, in which tuples are lists.
    identity = json.loads(json.dumps(identity, default=str))
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"identity": identity, "value": measure()})
        write_atomically(file, text)
    stored = read_object(file, "identity", "value")
    if stored["identity"] != identity:
        raise ValueError(
            f"{file} holds the result of other settings; remove it or give another "
            "--run-dir"
        )
    return stored["value"]


class Spent(NamedTuple):
    """Cost of a training, over all processes that took part in it.

    Attributes:
        seconds: wall time.
        skipped_updates: for gradients that were not finite.
        finished: whether the training is complete.
    """

    seconds: float = 0.0
    skipped_updates: int = 0
    finished: bool = False


def spent(folder: Path) -> Spent:
    """The cost of the training of a folder so far."""
    file = folder / SPENT
    return Spent(**read_object(file)) if file.is_file() else Spent()


def train_once(folder: Path, train: Callable[[], Outcome]) -> Spent:
    """Trains in a folder, unless that training has finished before.

    `train` continues from the folder's checkpoints.
    """
    before = spent(folder)
    if before.finished:
        return before
    say(f"training in {folder}")
    began = time.monotonic()
    outcome = train()
    found = Spent(
        before.seconds + time.monotonic() - began,
        outcome.skipped_steps,
        outcome.reason == "finished",
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / SPENT, json.dumps(found._asdict()))
    if not found.finished:
        raise SystemExit(outcome.exit_code)
    return found


def climb_rate(
    rates: Sequence[float], first: float, validation_loss: Callable[[float], float]
) -> dict[str, Any]:
    """The learning rate of the lowest loss on validation data, inside those tried.

    Neighbours of the best are tried until both are worse, from `first` on.

    Args:
        rates: that may be tried, ascending.
        first: one of them.
        validation_loss: of a rate; infinite or NaN where training diverges.

    Returns:
        `rate` and `tried`, the losses by rate. `rate` is an end of `rates` where that
        is the best of all, and then no best is known.
    """
    losses: dict[int, float] = {}
    best = rates.index(first)
    while untried := [
        i for i in (best, best + 1, best - 1) if 0 <= i < len(rates) and i not in losses
    ]:
        loss = validation_loss(rates[untried[0]])
        losses[untried[0]] = math.inf if math.isnan(loss) else loss
        best = min(losses, key=lambda i: losses[i])
    return {
        "rate": rates[best],
        "tried": {f"{rates[i]:g}": losses[i] for i in sorted(losses)},
    }


class Trainings(NamedTuple):
    """The trainings of one row by learning rate and seed, each done once.

    Attributes:
        folder: of their numbers.
        identity: settings that these depend on.
        rates: that may be tried with the first seed.
        first: one of them.
        seeds: all have the rate that the first one chose.
        loss: of the numbers of a training, on validation data. One that diverged has no
            numbers but `diverged`.
    """

    folder: Path
    identity: Any
    rates: Sequence[float]
    first: float
    seeds: Sequence[int]
    loss: Callable[[dict[str, Any]], float]

    def file(self, rate: float, seed: int) -> Path:
        return self.folder / f"seed{seed}" / f"rate{rate:g}.json"

    def run(self, measure: Callable[[float, int], dict[str, Any]]) -> dict[str, Any]:
        """The rate, the losses of those `tried`, and the `runs` of all seeds."""

        def tried_once(rate: float, seed: int) -> dict[str, Any]:
            try:
                return measure(rate, seed)
            except FloatingPointError as error:
                return {"diverged": str(error)}

        def measured(rate: float, seed: int) -> dict[str, Any]:
            file = self.file(rate, seed)
            return once(file, lambda: tried_once(rate, seed), self.identity)

        found = climb_rate(
            self.rates, self.first, lambda x: self._loss(measured(x, self.seeds[0]))
        )
        tried = {k: v if v < math.inf else None for k, v in found["tried"].items()}
        runs = [{"seed": seed} | measured(found["rate"], seed) for seed in self.seeds]
        return {"learning_rate": found["rate"], "tried": tried, "runs": runs}

    def left(self) -> int:
        """The number of trainings that are missing, none if and only if it is 0."""

        def loss(rate: float) -> float:
            file = self.file(rate, self.seeds[0])
            return self._loss(read_object(file, "value")["value"])

        try:
            chosen = [climb_rate(self.rates, self.first, loss)["rate"]]
            tried = 0
        except FileNotFoundError:
            # Three rates with the first seed, one with each of the others.
            chosen = self.rates
            tried = max(1, min(3, len(chosen)) - self._done(chosen, self.seeds[0]))
        return tried + sum(not self._done(chosen, x) for x in self.seeds[1:])

    def _loss(self, numbers: dict[str, Any]) -> float:
        return math.inf if "diverged" in numbers else self.loss(numbers)

    def _done(self, rates: Sequence[float], seed: int) -> int:
        return sum(self.file(rate, seed).is_file() for rate in rates)


def run_all(
    runs: Iterable[Run],
    measure: Callable[[str, int, Path], dict[str, Any]],
    *,
    run_dir: Path,
    identity: Callable[[str, int], Any],
    report: Callable[[list[dict[str, Any]]], Any] | None = None,
) -> list[dict[str, Any]]:
    """Does all runs, the finished ones excepted.

    Args:
        runs: rows with their seeds.
        measure: (row, seed, folder) -> numbers of this run, as JSON has them.
        run_dir: of the runs' numbers.
        identity: (row, seed) -> settings that these numbers depend on.
        report: called with the rows so far after each new run, and at the end: `name`,
            `seed` and the numbers of each.
    """
    found, is_new = [], False
    for row, seed in runs:
        folder = run_folder(run_dir, row, seed)
        file = folder / SCORE
        is_new = not file.is_file()
        if is_new:
            say(f"{row}, seed {seed}")
        run = (row, seed, folder)
        numbers = once(file, lambda run=run: measure(*run), identity(row, seed))
        found.append({"name": row, "seed": seed} | numbers)
        if is_new and report is not None:
            report(found)
    if not is_new and report is not None:
        report(found)
    return found


def run_folder(run_dir: Path, row: str, seed: int) -> Path:
    """The folder of one run of `run_all`."""
    return run_dir / row.replace(" ", "_").replace("/", "_") / f"seed{seed}"


def stored(run_dir: Path, rows: Iterable[str]) -> list[dict[str, Any]]:
    """Finished runs of these rows with any seed, as `run_all` reports them."""
    found = []
    for row in rows:
        for file in sorted(
            run_dir.glob(f"{run_folder(Path(), row, 0).parent}/*/{SCORE}")
        ):
            seed = int(file.parent.name.removeprefix("seed"))
            numbers = read_object(file, "value")["value"]
            found.append({"name": row, "seed": seed} | numbers)
    return found


def plan(runs: Iterable[Run], run_dir: Path, minutes: Callable[[str], float]) -> None:
    """Prints the runs that `run_all` would do, and their cost by row."""
    missing = [run for run in runs if not (run_folder(run_dir, *run) / SCORE).is_file()]
    show_plan({f"{row}, seed {seed}": minutes(row) for row, seed in missing})


def show_plan(minutes: Mapping[str, float]) -> None:
    """Prints the missing runs, each with its minutes, and the hours in all."""
    for run, cost in minutes.items():
        print(f"{run}: {cost:.0f} minutes")
    print(f"{len(minutes)} missing: {sum(minutes.values()) / 60:.1f} hours")
