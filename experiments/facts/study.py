"""Does a memory hold more facts than a cache of as many bytes has entries?

    python -m experiments.facts.study --plan
    python -m experiments.facts.study            # resumes, writes after each run
    python -m experiments.facts.study --only DeltaNet "learned cache" --budgets 5632

A log in plain bytes states 16 to 64 facts in twelve wordings, a quarter of them anew
with another code. Text of test documents goes on for up to 1,048,576 bytes, and every
fact is asked in other words (`task`). Rows: memories of equal parameters and
equal state; rivals that are trained alike, a sliding window, a cache that learns what
to keep and a GRU (`rivals`), which has more parameters than all others; baselines that
are not trained: text, plain or compressed, which a reader who makes no mistake reads
again. Columns: right answers, of all three digits, by facts and bytes since the log.
The dictionary is the ceiling: a list of the facts, by a reader who knows what counts.

All train on texts of 256, 1,024 and 4,096 bytes. The first seed's validation texts
choose the learning rate, neighbours of the best being tried until both are worse.

Falsified, as the table says, if the learned cache is ahead at 32 and at 64 facts, or if
no memory holds half of the fewest facts at 262,144 bytes.

It does not show natural language: statements and questions are of a few forms, and all
names occur in training. Streams are of the same documents, from other places.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments.facts import answers, task
from experiments.facts.rivals import UNITS, GRUConfig, LearnedCacheConfig
from experiments.lab import study
from experiments.lab.intervals import check_seeds, median_and_range
from experiments.lab.results import RESULTS, Rows, number, settings, write_report
from experiments.memories import mqar, small_models
from experiments.memories.notes_task import text_of
from experiments.memories.recall import Row
from experiments.memories.small_models import Scale
from memjax.config_io import to_record
from memjax.evaluation.statistics import MIN_DOCUMENTS
from memjax.models import LanguageModel, ModelConfig
from memjax.status import say

#: Trainings, the facts of their texts, and their rates relative to the first.
STAGES: tuple[tuple[Scale, tuple[int, ...], float], ...] = (
    (Scale(2, 32, 2, 8, 256, 12 * 256, 2000, 1.0, warmup=0.3), (1, 2, 4), 1.0),
    (Scale(2, 32, 2, 8, 1024, 6 * 1024, 600, 1.0), (4, 8, 16), 1.0),
    (Scale(2, 32, 2, 8, 4096, 3 * 4096, 300, 1.0), (16, 32, 64), 0.5),
)
#: Rates that may be tried, from `FIRST` up or down until the best is inside.
RATES, FIRST = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1), 1e-2
#: CPU minutes of DeltaNet's training, compilation and reading.
MINUTES = 11.0
#: Validation texts of a count.
VALIDATION = 16
#: Distance of the second falsifier, and the share that has to be held there.
FAR, HALF = 262_144, 0.5
WINDOW, CACHE, GRU = "sliding window", "learned cache", "GRU"
#: The most telling first.
ROWS: dict[str, Row] = {
    "DeltaNet": Row("deltanet"),
    CACHE: Row("learned_cache"),
    WINDOW: Row("sliding_window"),
    # Of an open chunk the tokens are part of the state: one leaves the widest memory.
    "TTT": Row("ttt_linear", {"chunk_size": 1}),
    "Lattice": Row("lattice", {"chunk_size": 1}),
    "Trellis": Row("trellis", {"chunk_size": 1}),
    "Trellis, no gates": Row("trellis", {"chunk_size": 1, "forget": False}),
    "Gated DeltaNet": Row("gated_deltanet"),
    GRU: Row("gru"),
}
MEMORIES = tuple(name for name in ROWS if name not in (WINDOW, CACHE, GRU))


@dataclasses.dataclass(frozen=True)
class Config:
    """Rows, sizes and questions.

    Attributes:
        only: names of the rows to run; none is all.
        budgets: bytes of the states.
        seeds: of parameters and training texts; 3 at least, for a range.
        counts: facts of a log.
        distances: bytes of text between the log and the questions, ascending.
        streams: of each count; 5 at least, for an interval.
        plan: print the missing runs, and stop.
        run_dir: of the runs' numbers.
        output: result file, without the ending.
    """

    only: tuple[str, ...] = ()
    budgets: tuple[int, ...] = (5632, 22_528)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    counts: tuple[int, ...] = (16, 32, 64)
    distances: tuple[int, ...] = (256, 4096, 16_384, 65_536, FAR, 1_048_576)
    streams: int = 8
    plan: bool = False
    run_dir: Path = Path("runs/facts")
    output: Path = RESULTS / "facts" / "study"

    def __post_init__(self):
        check_seeds(self.seeds)
        if self.streams < MIN_DOCUMENTS:
            raise ValueError(
                f"streams must be at least {MIN_DOCUMENTS} for an interval, got "
                f"{self.streams}"
            )
        if any(n % answers.PIECE for n in self.distances) or (
            sorted(set(self.distances)) != [*self.distances]
        ):
            raise ValueError(
                f"distances must ascend, each a multiple of {answers.PIECE}, "
                f"got {self.distances}"
            )
        if not all(1 <= n <= len(task.NAMES) for n in self.counts):
            raise ValueError(
                f"counts must be in [1, {len(task.NAMES)}], got {self.counts}"
            )


def model(name: str, budget: int) -> ModelConfig:
    """The model of a row, its state nearest to `budget` bytes.

    The width of the feed-forward gives every row DeltaNet's number of parameters; the
    GRU has more.

    Raises:
        ValueError: if the budget is smaller than one entry, or no size comes near it.
    """
    base = mqar.SMALL._replace(vocab_size=task.VOCAB_SIZE)
    plain, row = mqar.of_bytes(base, "deltanet", budget), ROWS[name]
    if name not in (CACHE, GRU):
        made = mqar.of_bytes(base, row.mechanism, budget, **row.options)
    else:
        width, heads = base.scale.model_dim, base.scale.heads

        def make(size: int) -> ModelConfig:
            if name == GRU:
                mechanism = GRUConfig(width, size, UNITS, UNITS)
            else:
                sizes = (width, heads, base.width, base.width)
                mechanism = LearnedCacheConfig(*sizes, entries=size)
            return dataclasses.replace(plain, mechanisms=(mechanism,))

        made = small_models.equal_state(make, budget)
    if name == GRU:
        return made
    missing = small_models.parameters(plain) - small_models.parameters(made)
    more = round(missing / (3 * made.model_dim * made.num_layers))
    return dataclasses.replace(made, hidden_dim=made.hidden_dim + more)


def main(config: Config) -> None:
    """Trains the missing runs, the rates of all rows first, and writes after each."""
    names = study.selected(config.only, [*ROWS])
    cases = [(name, budget) for budget in config.budgets for name in names]
    made = {case: model(*case) for case in cases}
    if config.plan:
        study.show_plan(_missing(config, made))
        return
    study.use_compile_cache(config.run_dir)
    sizes = answers.LOG, config.distances[-1], mqar.TEST
    streams = {
        n: task.draw_streams("test", config.streams, n, *sizes) for n in config.counts
    }
    asked = [config.budgets, *_asked(config)]
    file = config.run_dir / f"baselines-{study.digest(asked)}.json"
    parameters = small_models.parameters(model("DeltaNet", Config.budgets[0]))
    given = config.budgets, config.distances, streams, parameters
    read_again = study.once(file, lambda: answers.read_again(*given), asked)
    results: dict[str, Any] = {"log": answers.LOG, "baselines": read_again}
    # All rows once; then other rates; then other seeds.
    first = config.seeds[:1]
    for rates, seeds in (((FIRST,), first), (RATES, first), (RATES, config.seeds)):
        for case in cases:
            say(f"{case[0]}, {case[1]:,} bytes, rates {rates}, seeds {seeds}")
            runs = _runs(config, made[case], rates, seeds, streams)
            about = {
                **{"name": case[0], "budget": case[1]},
                "state_bytes": small_models.state_bytes(made[case]),
                "parameters": small_models.parameters(made[case]),
            }
            results.setdefault("rows", {})["{}, {}".format(*case)] = about | runs
            question = "does a memory hold more facts than a cache has entries?"
            write_report(config.output, question, settings(config), results)
    for line in verdict(results, config.counts, config.distances):
        print(line)
    print(f"wrote {config.output}.json: python -m experiments.lab.render")


def _asked(config: Config) -> list[Any]:
    return [config.counts, config.distances, config.streams, answers.LOG]


def _identity(config: Config, made: ModelConfig) -> list[Any]:
    return [to_record(made), STAGES, *_asked(config)]


def _missing(
    config: Config, made: Mapping[tuple[str, int], ModelConfig]
) -> dict[str, float]:
    """Minutes of the trainings that are missing: two more are tried with one seed."""
    missing = {}
    for (name, budget), config_of in made.items():
        folder = config.run_dir / study.digest(_identity(config, config_of))
        left = len(config.seeds) + 2 - len([*folder.glob("seed*/rate*.json")])
        if left > 0:
            missing[f"{name}, {budget:,} bytes, {left} trainings"] = left * MINUTES
    return missing


def _runs(
    config: Config,
    made: ModelConfig,
    rates: Sequence[float],
    seeds: Sequence[int],
    streams: Mapping[int, task.Stream],
) -> dict[str, Any]:
    """The rate that the first seed chose, and the runs of all seeds with it."""
    identity = _identity(config, made)
    folder = config.run_dir / study.digest(identity)

    def measured(rate: float, seed: int) -> dict[str, Any]:
        file = folder / f"seed{seed}" / f"rate{rate:g}.json"
        return study.once(
            file, lambda: measure(config, made, rate, seed, streams), identity
        )

    def loss(rate: float) -> float:
        return 1 - measured(rate, seeds[0]).get("validation", -math.inf)

    chosen = study.climb_rate(rates, FIRST, loss)
    rate, tried = chosen["rate"], chosen["tried"]
    tried = {k: v if math.isfinite(v) else None for k, v in tried.items()}
    runs = [{"seed": seed} | measured(rate, seed) for seed in seeds]
    return {"learning_rate": rate, "tried": tried, "runs": runs}


def measure(
    config: Config,
    made: ModelConfig,
    rate: float,
    seed: int,
    streams: Mapping[int, task.Stream],
) -> dict[str, Any]:
    """Trains and asks; `right` are shares [distances, streams] by count.

    A training that diverges has no numbers but `diverged`.
    """
    trained, seconds = None, 0.0
    try:
        for scale, counts, relative in STAGES:
            own = scale._replace(learning_rate=rate * relative)
            draw_batch = draw_batches(scale, counts)
            trained, more = small_models.train(own, made, seed, draw_batch, trained)
            seconds += more
    except FloatingPointError as error:
        return {"diverged": str(error)}
    assert trained is not None  # There are stages.
    began = time.process_time()
    found = answers.answer(trained, streams, config.distances)
    return {
        "cpu_seconds": seconds,
        "reading_cpu_seconds": time.process_time() - began,
        "validation": validation(trained),
        "right": {str(n): x.mean(axis=2).tolist() for n, x in found.items()},
    }


@functools.lru_cache(maxsize=len(STAGES))
def draw_batches(scale: Scale, counts: tuple[int, ...]) -> Callable:
    """The function that draws a batch; one a stage, so that models share its text."""
    text = jnp.asarray(text_of("train"))
    rows = scale.tokens_per_update // scale.context_length

    def draw(seed, step):
        key = jax.random.fold_in(jax.random.key(seed), step)
        return task.training_batch(text, rows, counts, scale.context_length, key)

    return draw


def validation(trained: LanguageModel) -> float:
    """Share of right digits in texts of validation documents as the last stage's."""
    scale, counts, _ = STAGES[-1]
    text, rows = jnp.asarray(text_of("validation")), VALIDATION * len(counts)
    key = jax.random.key(mqar.VALIDATION)
    batch = task.training_batch(text, rows, counts, scale.context_length, key)
    return mqar.accuracy(trained, batch)


def _shares(row: Mapping[str, Any], count: int, i: int) -> list[float]:
    """Right answers at a distance with each seed; a training that diverged has none."""
    return [
        float(np.mean(run["right"][str(count)][i])) if "right" in run else 0.0
        for run in row["runs"]
    ]


def verdict(
    result: Mapping[str, Any], counts: Sequence[int], distances: Sequence[int]
) -> Iterator[str]:
    """Results of both falsifiers at each budget, by medians over seeds."""
    rows = result["rows"].values()
    for budget in dict.fromkeys(row["budget"] for row in rows):
        of = {row["name"]: row for row in rows if row["budget"] == budget}
        memories = [name for name in MEMORIES if name in of]
        if CACHE not in of or not memories:
            yield f"{budget:,} bytes: not decided, rows are missing"
            continue

        def median(name: str, count: int, i: int, of=of) -> float:
            return float(np.median(_shares(of[name], count, i)))

        behind = [
            n
            for n in counts[-2:]
            if median(CACHE, n, 0) > max(median(name, n, 0) for name in memories)
        ]
        far = [i for i, distance in enumerate(distances) if distance >= FAR]
        held = [max(median(name, counts[0], i) for name in memories) for i in far[:1]]
        wrong = []
        if len(behind) == len(counts[-2:]):
            wrong.append("the learned cache is ahead of every memory")
        if held and held[0] < HALF:
            wrong.append(f"no memory holds half of {counts[0]} facts so far")
        yield f"{budget:,} bytes: " + (
            "falsified: " + "; ".join(wrong) if wrong else "holds"
        )


def rows_of(result: Mapping[str, Any]) -> Rows:
    """Right answers of all rows by facts and bytes since the log."""
    counts, distances = (result["config"][key] for key in ("counts", "distances"))
    chosen = [i for i, x in enumerate(distances) if i == 0 or x >= FAR]
    for row in result["rows"].values():
        cells = {"right answers": f"{row['name']}, {row['budget']:,} bytes"}
        cells["state, bytes"] = number(row["state_bytes"], 0)
        cells["seeds"] = str(len(row["runs"]))
        yield cells | {
            f"{n} facts, {distances[i]:,} later": median_and_range(_shares(row, n, i))
            for n in counts
            for i in chosen
        }
    for budget, found in result["baselines"].items():
        for name, by_count in found.items():
            yield {"right answers": f"{name}, {int(budget):,} bytes"} | {
                f"{n} facts, {distances[i]:,} later": number(by_count[str(n)][i], 2)
                for n in counts
                for i in chosen
            }
    yield "median (range) over seeds"
    yield from verdict(result, counts, distances)


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
