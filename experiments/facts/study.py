"""Does a memory hold more facts than a cache of as many bytes has entries?

    python -m experiments.facts.study             # ten minutes on two cores
    python -m experiments.facts.study --seeds 0 1 2 3 4 --only DeltaNet "learned cache"

A log in plain bytes states 16 to 64 facts in twelve wordings, a quarter of them anew
with another code. Text of test documents goes on, and every fact is asked in other
words (`task`). Rows: memories of equal parameters and equal state; rivals that are
trained alike, a sliding window, a cache that learns what to keep and a GRU (`rivals`),
which has more parameters than all others; baselines that are not trained: text, plain
or compressed, which a reader who makes no mistake reads again. Columns: right answers,
by facts and bytes since the log. The dictionary is the ceiling: a list of the facts, by
a reader who knows what counts.

All train on texts of 128, 512 and 2,048 bytes; the cache, which learns nothing while it
drops what it cannot attend to yet, begins with more entries, and has more updates
(`stages_of`). With more than one of `--rates` the first seed's validation texts choose,
neighbours of the best being tried until both are worse.

Falsified, as the table says, if the learned cache is ahead at 32 and at 64 facts, or if
no memory holds half of the fewest facts at 262,144 bytes.

It does not show natural language: statements and questions are of a few forms, and all
names occur in training. Streams are of the same documents, from other places.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from experiments.facts import answers, tables, task
from experiments.facts.rivals import UNITS, GRUConfig, LearnedCacheConfig
from experiments.lab import options, study
from experiments.lab.results import rows_before, settings, write_report
from experiments.memories import mqar, small_models
from experiments.memories.recall import Row
from experiments.memories.small_models import Scale
from experiments.memories.text import text_of
from memjax.config_io import to_record
from memjax.data.batches.batch import Batch
from memjax.evaluation.statistics import MIN_DOCUMENTS
from memjax.mechanisms.cells.base import CellConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.nnx.params import as_arrays, as_params
from memjax.status import say

QUESTION = "does a memory hold more facts than a cache has entries?"
#: A training, and the facts of its texts.
Stage = tuple[Scale, tuple[int, ...]]
STAGES: tuple[Stage, ...] = (
    (Scale(2, 32, 2, 8, 128, 32 * 128, 200, 1.0), (1, 2)),
    (Scale(2, 32, 2, 8, 512, 10 * 512, 250, 1.0), (4, 8)),
    (Scale(2, 32, 2, 8, 2048, 4 * 2048, 300, 1.0), (16, 32)),
)
#: The first rate that is tried.
FIRST = 1e-2
#: CPU minutes of training, compilation and reading: of DeltaNet, and of slower ones.
MINUTES, SLOWER = 4.0, {"trellis": 120.0}
#: Validation texts of a count.
VALIDATION = 16
WINDOW, CACHE, GRU = tables.RIVALS
#: Half-lives of forget gates before training, in tokens: the shortest is as long as a
#: training text. By default those of Trellis are 69 tokens.
HALF_LIVES = 2048.0, 65_536.0
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
    "Trellis, slow gates": Row("trellis", {"chunk_size": 1}),
    "Gated DeltaNet": Row("gated_deltanet"),
    "Gated DeltaNet, slow gates": Row("gated_deltanet"),
    GRU: Row("gru"),
}
#: Three memories and a rival.
QUICK = ("DeltaNet", "TTT", "Lattice", CACHE)
Facts = Annotated[int, options.within(1, len(task.NAMES))]
Distances = Annotated[tuple[options.Natural, ...], options.ascending]


@dataclasses.dataclass(frozen=True)
class Config(options.Options):
    """Rows, sizes and questions.

    Attributes:
        only: names of the rows to run.
        budgets: bytes of the states.
        seeds: of parameters and training texts: one, or three at least for a range.
        rates: learning rates that may be tried, ascending, 0.01 first.
        counts: facts of a log, ascending.
        distances: bytes of text between the log and the questions, ascending.
        streams: of each count; 5 at least, for an interval.
        plan: print the missing runs, and stop.
        run_dir: of the runs' numbers, the result and the plot; rows of calls with other
            `only` and `rates` stay in it.
    """

    only: tuple[Annotated[str, options.among(*ROWS)], ...] = QUICK
    budgets: tuple[Annotated[int, options.within(1, 2**20)], ...] = (5632,)
    seeds: tuple[options.Seed, ...] = (0,)
    rates: Annotated[tuple[options.Rate, ...], options.ascending] = (FIRST,)
    counts: Annotated[tuple[Facts, ...], options.ascending] = (16, 32, 64)
    distances: Distances = (256, 4096, 16_384, 65_536)
    streams: Annotated[int, options.within(MIN_DOCUMENTS, 1024)] = 8
    plan: bool = False
    run_dir: options.Folder = Path("runs/facts")

    def __post_init__(self):
        super().__post_init__()
        if len(self.seeds) != 1:
            options.enough_seeds("seeds", self.seeds)
        if FIRST not in self.rates:
            raise ValueError(f"rates must have {FIRST}, got {self.rates}")
        most = len(text_of("test")) - answers.LOG
        if any(n % answers.PIECE or n > most for n in self.distances):
            raise ValueError(
                f"distances must be multiples of {answers.PIECE} up to {most}, the "
                f"bytes of the test documents behind the log, got {self.distances}"
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


def main(config: options.Flags[Config]) -> None:
    """Trains the missing runs, asks, writes after each row, and prints."""
    cases = [(name, budget) for budget in config.budgets for name in config.only]
    try:
        made = {case: model(*case) for case in cases}
    except ValueError as error:
        why = f"budgets must suit all rows, got {config.budgets}: {error}"
        raise ValueError(why) from error
    if config.plan:
        missing = {}
        for (name, budget), of_row in made.items():
            if left := _trainings(config, of_row, "slow" in name).left():
                minutes = left * SLOWER.get(ROWS[name].mechanism, MINUTES)
                missing[f"{name}, {budget:,} bytes, {left} trainings"] = minutes
        return study.show_plan(missing)
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
    output, result = config.run_dir / "results", {}
    results: dict[str, Any] = {"log": answers.LOG, "baselines": read_again}
    for name, budget in cases:
        of_row = made[name, budget]
        say(f"{name}, {budget:,} bytes")
        start = functools.partial(slow_gates, of_row) if "slow" in name else None
        about = {
            "name": name,
            "budget": budget,
            "state_bytes": small_models.state_bytes(of_row),
            "parameters": small_models.parameters(of_row),
        }

        def measured(rate: float, seed: int, of_row=of_row, start=start):
            given = config, of_row, rate, seed, streams
            return measure(*given, start and start(seed))

        runs = _trainings(config, of_row, start is not None).run(measured)
        with rows_before(output, config, "only", "rates") as before:
            results["rows"] = dict(before) | {f"{name}, {budget}": about | runs}
            result = write_report(output, QUESTION, settings(config), results)
    tables.plot.draw(result, Path(f"{output}.png"))
    tables.print_all(result, streams)
    print(f"wrote {output}.json and .png")


def _asked(config: Config) -> list[Any]:
    return [config.counts, config.distances, config.streams, answers.LOG]


def stages_of(made: ModelConfig) -> Iterator[tuple[ModelConfig, Stage]]:
    """The trainings of a model, each with its model.

    A cache that drops tokens from the start learns nothing: it begins with an entry for
    each byte of the shortest texts, and then has a quarter.
    """
    (cache,), (scale, _) = made.mechanisms, STAGES[0]
    if isinstance(cache, LearnedCacheConfig):
        for entries in (scale.context_length, scale.context_length // 4):
            larger = dataclasses.replace(cache, entries=max(entries, cache.entries))
            yield dataclasses.replace(made, mechanisms=(larger,)), STAGES[0]
    yield from ((made, stage) for stage in STAGES)


def _identity(config: Config, made: ModelConfig, slow: bool) -> list[Any]:
    start = [HALF_LIVES] if slow else []
    start += [to_record(x) for x, _ in stages_of(made) if x != made]
    return [to_record(made), STAGES, *_asked(config), *start]


def _trainings(config: Config, made: ModelConfig, slow: bool) -> study.Trainings:
    identity = _identity(config, made, slow)
    folder = config.run_dir / study.digest(identity)
    given = folder, identity, config.rates, FIRST, config.seeds
    return study.Trainings(*given, lambda numbers: 1 - numbers["validation"])


def measure(
    config: Config,
    made: ModelConfig,
    rate: float,
    seed: int,
    streams: Mapping[int, task.Stream],
    trained: LanguageModel | None = None,
) -> dict[str, Any]:
    """Trains, from a model or its seed, and asks.

    `right` are shares [distances, streams] by count, `first` the answers to the first
    stream of each.
    """
    seconds = 0.0
    for sized, stage in stages_of(made):
        scale = stage[0]._replace(learning_rate=rate)
        trained, more = small_models.train(scale, sized, seed, draw, stage, trained)
        seconds += more
    assert trained is not None  # There are stages.
    began = time.process_time()
    found = answers.answer(trained, streams, config.distances)
    return {
        "cpu_seconds": seconds,
        "reading_cpu_seconds": time.process_time() - began,
        "validation": validation(trained),
        "right": {str(n): x.mean(axis=2).tolist() for n, x in found.items()},
        "first": {str(n): x[:, 0].tolist() for n, x in found.items()},
    }


def slow_gates(config: ModelConfig, seed: int) -> LanguageModel:
    """A model before training whose gates forget as slowly as `HALF_LIVES`."""
    model = LanguageModel(config, key=jax.random.key(seed))
    for mechanism, block in zip(config.layers, model.blocks, strict=True):
        assert isinstance(mechanism, CellConfig)
        params = as_arrays(block.mechanism)
        # These gates have biases, or rates: they need no constant weight.
        none = jnp.zeros(config.model_dim)
        cell = mechanism.with_half_lives(params.cell, HALF_LIVES, none)
        block.mechanism = nnx.data(as_params(params._replace(cell=cell)))
    return model


def draw(stage: Stage, seed: Array, step: Array) -> Batch:
    """Texts of an update of a stage."""
    text, (scale, counts) = jnp.asarray(text_of("train")), stage
    rows = scale.tokens_per_update // scale.context_length
    key = jax.random.fold_in(jax.random.key(seed), step)
    return task.training_batch(text, rows, counts, scale.context_length, key)


def validation(trained: LanguageModel) -> float:
    """Share of right codes in texts of validation documents as the last stage's."""
    scale, counts = STAGES[-1]
    text, rows = jnp.asarray(text_of("validation")), VALIDATION * len(counts)
    key = jax.random.key(mqar.VALIDATION)
    batch = task.training_batch(text, rows, counts, scale.context_length, key)
    return mqar.accuracy(trained, batch)


if __name__ == "__main__":
    options.run(main)
