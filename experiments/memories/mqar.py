"""Multi-query associative recall (MQAR): small models learn it and are tested on it.

A sequence names key-value pairs, then asks for the value of every key (Zoology). Filler
between the questions has ids of its own: it never repeats a key. Models are trained at
one length, and tested on other sequences at this and greater ones. All have equal
parameters and a state of as many bytes as DeltaNet's of this size; they see equal
sequences in equal order.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool

from experiments.lab import study
from experiments.lab.intervals import summarise_seeds
from experiments.lab.results import RESULTS, settings, show, spread, write_report
from experiments.memories import on_device, small_models
from experiments.memories.small_models import Scale
from memjax.checks import check_sizes
from memjax.config_io import to_record
from memjax.data import multi_query_recall
from memjax.data.batches.batch import Batch
from memjax.models import LanguageModel, ModelConfig
from memjax.models.language_model.presets import RECURRENT
from memjax.training import pretrain as run

BASE = "DeltaNet"
# Seeds of the sequences that choose and of those that test, which no training has.
VALIDATION, TEST = 2**32 - 2, 2**32 - 1
#: Minutes of one training on two cores.
MINUTES = 1.5


class Task(NamedTuple):
    """The sequences, and the size of the models.

    Attributes:
        scale: of models and training; its length is that of the training sequences.
        vocab_size: keys, values and filler.
        fillers: the last ids.
        pairs: of a training sequence; every update has as many sequences of each.
        tested: pairs of the tests.
        lengths: of the tests; a length tests the pairs that fit into it.
    """

    scale: Scale
    vocab_size: int
    fillers: int
    pairs: tuple[int, ...]
    tested: tuple[int, ...]
    lengths: tuple[int, ...]

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        return self._asdict() | {"scale": self.scale._asdict()}


SMALL = Task(
    scale=Scale(2, 32, 2, 8, 64, 36 * 64, 1500, 1e-2),
    # 65 keys: with 79 full attention did not learn the task in as many updates.
    vocab_size=196,
    fillers=64,
    pairs=(4, 8, 16),
    tested=(4, 8, 16, 32, 64),
    lengths=(64, 256, 1024),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Rows, seeds, training and tests of a study of recall.

    Attributes:
        only: names of the rows to run; none is all.
        seeds: of parameters and data order; at least 2, and 3 to claim a difference.
        steps: updates of each model; 0 is the task's.
        rates: learning rates to choose from; none is the task's alone.
        warmup: share of the updates in which the learning rate rises. Attention that
            reaches its peak sooner does not learn the task.
        test_rows: sequences of each test.
        plan: print the missing runs, and stop.
        run_dir: of runs and their numbers.
        output: result file, without the ending.
    """

    only: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1)
    steps: int = 0
    rates: tuple[float, ...] = ()
    warmup: float = 0.3
    test_rows: int = 64
    plan: bool = False
    run_dir: Path = Path("runs/recall")
    output: Path = RESULTS / "memories"

    def __post_init__(self):
        if len(set(self.seeds)) < max(2, len(self.seeds)):
            raise ValueError(f"seeds must be 2 or more, all distinct, got {self.seeds}")
        check_sizes(test_rows=self.test_rows)
        if self.steps < 0:
            raise ValueError(f"steps must be >= 0, got {self.steps}")
        if self.rates:
            study.check_rates(self.rates)

    @property
    def task(self) -> Task:
        """The task, with the steps of the options."""
        steps = self.steps or SMALL.scale.steps
        return SMALL._replace(scale=SMALL.scale._replace(steps=steps))


# Memories are square, as in the papers: as many slots as a key is wide.
_SQUARE = ("key_dim", "value_dim")
#: The sizes of a mechanism that make its state as large as DeltaNet's, all one number.
SIZES = {
    "sliding_window": ("window",),
    "linear_attention": _SQUARE,
    "mamba2": _SQUARE,
    "gla": _SQUARE,
    "deltanet": _SQUARE,
    "gated_deltanet": _SQUARE,
    "gsa": ("slots", *_SQUARE),
    "abc": ("slots", *_SQUARE),
    "ttt_linear": _SQUARE,
    "trellis": ("slots", *_SQUARE),
    "lattice": ("slots", "value_dim"),
}
# Memories so small are read fastest by a loop over tokens, on a CPU.
SMALL_OPTIONS = {"implementation": "reference"}
# The keys of an open chunk are part of the state: few beside few slots.
OPTIONS = {"trellis": {"chunk_size": 4}}


def model(task: Task, mechanism: str, **options: Any) -> ModelConfig:
    """A model with this mechanism in every layer, its state as large as DeltaNet's.

    Full attention keeps all tokens. `options` are the mechanism's own.
    """
    if mechanism in RECURRENT:
        options = SMALL_OPTIONS | OPTIONS.get(mechanism, {}) | options

    def make(**sizes: int) -> ModelConfig:
        return small_models.base_model(
            task.scale,
            task.vocab_size,
            mechanism,
            task.scale.context_length,
            **options,
            **sizes,
        )

    if mechanism not in SIZES:
        return make()
    goal = small_models.base_model(task.scale, task.vocab_size, "deltanet", 1)
    return small_models.equal_state(
        lambda size: make(**dict.fromkeys(SIZES[mechanism], size)),
        small_models.state_bytes(goal),
    )


def run_study(
    config: Config,
    models: Mapping[str, ModelConfig],
    report: Callable[[list[dict[str, Any]]], Any],
) -> list[dict[str, Any]]:
    """Trains and tests every model with every seed, at a rate of its own.

    A rate is chosen by the right answers to the validation sequences, with the first
    seed; the tests have no say in it.
    """
    rates = config.rates or (config.task.scale.learning_rate,)
    names = study.selected(config.only, list(models))
    if config.plan:
        tries = len(rates) / len(config.seeds) if len(rates) > 1 else 0
        minutes = {"rates": tries * MINUTES, "training": MINUTES}
        study.plan(names, config.seeds, config.run_dir, lambda name: minutes)
        return []

    def identity(name: str, seed: int) -> dict[str, Any]:
        record = to_record(_run(config, models[name], rates[0], seed))
        return {"run": record, "rates": rates, "test_rows": config.test_rows}

    def trained(name: str, rate: float, seed: int, folder: Path) -> dict[str, Any]:
        return study.once(
            folder / f"rate{rate:g}-seed{seed}.json",
            lambda: measure(config, _run(config, models[name], rate, seed)),
            identity(name, seed),
        )

    def measured(name: str, seed: int, folder: Path) -> dict[str, Any]:
        folder, first = folder.parent, config.seeds[0]
        chosen = study.choose_rate(
            rates,
            lambda rate: 1 - trained(name, rate, first, folder)["validation"],
            folder / "rate.json",
            {"steps": config.task.scale.steps, "seed": first},
        )
        config_of = models[name]
        return {
            "learning_rate": chosen["rate"],
            **trained(name, chosen["rate"], seed, folder),
            "parameters": small_models.parameters(config_of),
            "hidden_dim": config_of.hidden_dim,
            "state_bytes": small_models.state_bytes(config_of),
        }

    return study.run_all(
        names,
        config.seeds,
        measured,
        run_dir=config.run_dir,
        identity=identity,
        report=report,
    )


def _run(config: Config, model: ModelConfig, rate: float, seed: int) -> run.RunConfig:
    """The run of one model; its sequences do not come from `data.source`."""
    scale = config.task.scale._replace(learning_rate=rate)
    return small_models.run_config(scale, model, seed, warmup=config.warmup)


def batch(task: Task, seed: int | Array, step: int | Array) -> Batch:
    """The sequences of one update, as many of each number of pairs."""
    length = task.scale.context_length
    rows = task.scale.tokens_per_update // length // len(task.pairs)
    key = jax.random.fold_in(jax.random.key(seed), step)
    return _draw(key, rows, task.pairs, length, task.vocab_size, task.fillers)


def measure(config: Config, settings: run.RunConfig) -> dict[str, Any]:
    """Trains; then the share of right answers by pairs and by length of the sequence.

    `validation` is that of sequences which choose between models, and are no test.
    """
    task = config.task
    trained, seconds = on_device.train(settings, _drawing(task))

    def answers(seed: int, pairs: int, length: int) -> dict[str, float]:
        return accuracy(
            trained, [sequences(task, seed, config.test_rows, pairs, length)]
        )

    length = task.scale.context_length
    validation = [answers(VALIDATION, pairs, length)["tokens"] for pairs in task.pairs]
    scores = [
        {"pairs": pairs, "length": length} | answers(TEST, pairs, length)
        for length in task.lengths
        for pairs in task.tested
        if length >= 4 * pairs
    ]
    return {
        "validation": float(np.mean(validation)),
        "seconds": seconds,
        "scores": scores,
    }


@functools.lru_cache(maxsize=4)
def _drawing(task: Task) -> Callable[[Array, Array], Batch]:
    """One function a task, so that seeds share a program."""
    return functools.partial(batch, task)


def sequences(task: Task, seed: int, rows: int, pairs: int, length: int) -> Batch:
    """Sequences that no training has; those of a seed are the same for all models."""
    key = jax.random.fold_in(jax.random.key(seed), length)
    return _draw(key, rows, (pairs,), length, task.vocab_size, task.fillers)


def accuracy(model: LanguageModel, batches: Iterable[Batch]) -> dict[str, float]:
    """Share of sequences whose answers are all right, and share of right answers."""
    whole, right, queried = [], 0.0, 0.0
    for batch in batches:
        # The parameters at another length: attention has a cache of that length.
        sized = small_models.for_length(model.config, batch.tokens.shape[1])
        hits = np.asarray(
            _hits(small_models.structure(sized), nnx.state(model, nnx.Param), batch)
        )
        mask = np.asarray(batch.mask)
        whole.append((hits | (mask == 0)).all(axis=1))
        right += float((hits * mask).sum())
        queried += float(mask.sum())
    return {"accuracy": float(np.concatenate(whole).mean()), "tokens": right / queried}


def summarise(
    rows: Iterable[Mapping[str, Any]], base: str, length: int
) -> list[dict[str, Any]]:
    """Share of right answers at one length by model and pairs, against a base."""
    flat = [
        {"name": row["name"], "seed": row["seed"]} | score
        for row in rows
        for score in row["scores"]
        if score["length"] == length
    ]
    return summarise_seeds(flat, "tokens", base, "pairs")


def write(
    config: Config, question: str, rows: list[dict[str, Any]], **results: Any
) -> None:
    """Writes `config.output`.json: the task, the results, and every run."""
    results = {"task": config.task.record(), **results, "rows": rows}
    write_report(config.output, question, settings(config), results)


def show_summary(title: str, summary: Iterable[Mapping[str, Any]]) -> None:
    """Prints means with standard errors over seeds, by model and pairs."""
    by_name: dict[str, dict[int, str]] = {}
    for row in summary:
        cell = spread(row["mean"], row["error"], 3)
        by_name.setdefault(row["name"], {})[row["pairs"]] = cell
    pairs = list(dict.fromkeys(n for cells in by_name.values() for n in cells))
    rows = {n: [cells.get(p, "") for p in pairs] for n, cells in by_name.items()}
    show(title, [f"{n} pairs" for n in pairs], rows)


@functools.partial(jax.jit, static_argnums=0)
def _hits(graph, params, batch: Batch) -> Bool[Array, "B T"]:
    """Where the likeliest token is the target."""
    model = nnx.merge(graph, params)
    _, logits = model(model.init_state(batch.tokens.shape[0]), batch.tokens)
    return logits.argmax(axis=-1) == batch.targets


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _draw(
    key, rows: int, pairs: tuple[int, ...], length: int, vocab_size: int, fillers: int
) -> Batch:
    """`rows` sequences of each number of pairs."""
    parts = [
        multi_query_recall(
            jax.random.fold_in(key, count),
            rows,
            count,
            length,
            vocab_size,
            fillers=fillers,
        )
        for count in pairs
    ]
    return Batch(*map(jnp.concatenate, zip(*parts, strict=True)))
