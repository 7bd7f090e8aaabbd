"""Multi-query associative recall (MQAR): models of one state size learn and answer it.

A sequence names key-value pairs, then asks for the value of every key (Zoology). All
models have equal parameters and a state of as many bytes as DeltaNet's of this size,
everything counted that is kept between two calls; they see equal sequences in equal
order. Filler between the questions has ids of its own: it never repeats a key.

They are trained at one length, and tested on other sequences at this and greater ones.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool

from experiments.memories import on_device, seed_report
from experiments.memories import small_models as comparison
from experiments.memories.cases import Case
from experiments.memories.small_models import Scale
from memjax.data import multi_query_recall
from memjax.data.batches.batch import Batch
from memjax.models import LanguageModel, ModelConfig
from memjax.models.language_model.presets import RECURRENT
from memjax.training import pretrain as run

BASE = "DeltaNet"
# Seeds of the sequences that choose and of those that test, which no training has.
VALIDATION, TEST = 2**32 - 2, 2**32 - 1


class Task(NamedTuple):
    """What is asked, and of models of what size.

    Attributes:
        scale: of models and training; its length is that of the training sequences.
        vocab_size: keys, values and filler.
        fillers: the last ids.
        pairs: of a training sequence; every update has as many sequences of each.
        tested: pairs of the tests.
        lengths: of the tests; a length tests the pairs that it has room for.
    """

    scale: Scale
    vocab_size: int
    fillers: int
    pairs: tuple[int, ...]
    tested: tuple[int, ...]
    lengths: tuple[int, ...]


_PAIRS = (4, 8, 16, 32, 64)
SMALL = Task(
    scale=Scale(2, 32, 2, 8, 64, 36 * 64, 1500, 1e-2),
    # 65 keys: with 79 full attention did not learn the task in as many updates.
    vocab_size=196,
    fillers=64,
    pairs=(4, 8, 16),
    tested=_PAIRS,
    lengths=(64, 256, 1024),
)
#: As in Zoology's figure 2.
ZOOLOGY = Task(
    scale=Scale(2, 128, 2, 64, 256, 60 * 256, 20_000, 1e-3),
    vocab_size=8192,
    fillers=4096,
    pairs=_PAIRS,
    tested=_PAIRS,
    lengths=(256, 512, 1024),
)


@dataclasses.dataclass(frozen=True)
class Config(comparison.Config):
    """See `comparison.Config`.

    Attributes:
        warmup: share of the updates in which the learning rate rises. Attention that
            reaches its peak sooner does not learn the task.
        test_rows: sequences of each test.
    """

    seeds: tuple[int, ...] = (0, 1)
    warmup: float = 0.3
    test_rows: int = 64

    def __post_init__(self):
        super().__post_init__()
        if self.test_rows < 1:
            raise ValueError(f"test_rows must be at least 1, got {self.test_rows}")

    @property
    def task(self) -> Task:
        """The preset's, with the steps of the options."""
        task = SMALL if self.preset == "cpu" else ZOOLOGY
        steps = self.steps or task.scale.steps
        return task._replace(scale=task.scale._replace(steps=steps))


# Memories are square, as in the papers: as many slots as a key is wide.
_SQUARE = ("key_dim", "value_dim")
#: The sizes of a mechanism that make its state as large as DeltaNet's, all of one
#: number.
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
    "lattice": _SQUARE,
}


# Memories so small are read fastest by a loop over tokens, on a CPU.
SMALL_OPTIONS = {"implementation": "reference"}
# The keys of an open chunk are part of the state: few beside few slots.
OPTIONS = {"trellis": {"chunk_size": 4}}


def model(task: Task, mechanism: str, **options: Any) -> ModelConfig:
    """A model with this mechanism in every layer, its state as large as DeltaNet's.

    Full attention keeps all tokens. `options` are the mechanism's own.
    """
    if task.scale.model_dim < 128 and mechanism in RECURRENT:
        options = SMALL_OPTIONS | OPTIONS.get(mechanism, {}) | options
    make = functools.partial(
        *(comparison.base_model, task.scale, task.vocab_size, mechanism),
        task.scale.context_length,
        **options,
    )
    if mechanism not in SIZES:
        return make()
    goal = comparison.base_model(task.scale, task.vocab_size, "deltanet", 1)
    return comparison.equal_state(
        lambda size: make(**dict.fromkeys(SIZES[mechanism], size)),
        comparison.state_bytes(goal),
    )


def settings(config: Config, case: Case, seed: int) -> run.RunConfig:
    """The run of one model; its sequences do not come from `data.source`."""
    rate = case.fields.get("learning_rate", config.task.scale.learning_rate)
    scale = config.task.scale._replace(learning_rate=rate)
    return comparison.run_config(scale, case.model, seed, warmup=config.warmup)


def batch(task: Task, seed: int | Array, step: int | Array) -> Batch:
    """The sequences of one update, as many of each number of pairs."""
    length = task.scale.context_length
    rows = task.scale.tokens_per_update // length // len(task.pairs)
    key = jax.random.fold_in(jax.random.key(seed), step)
    return _draw(key, rows, task.pairs, length, task.vocab_size, task.fillers)


def measure(
    config: Config, case: Case, settings: run.RunConfig, folder: Path
) -> dict[str, Any]:
    """Trains; then the share of right answers by pairs and by length of the sequence.

    `validation` is that of sequences which choose between models, and are no test.
    """
    del case, folder  # All is in the settings, and a run of seconds keeps nothing.
    trained, found = train(config, settings)
    scores = [
        {"pairs": pairs, "length": length}
        | _answers(config, trained, TEST, pairs, length)
        for length in config.task.lengths
        for pairs in config.task.tested
        if length >= 4 * pairs
    ]
    return found | {"scores": scores}


def train(
    config: Config, settings: run.RunConfig
) -> tuple[LanguageModel, dict[str, float]]:
    """A trained model, its share of right validation answers, and its seconds."""
    task = config.task
    trained, seconds = on_device.train(settings, _drawing(task))
    length = task.scale.context_length
    answers = [
        _answers(config, trained, VALIDATION, pairs, length)["tokens"]
        for pairs in task.pairs
    ]
    return trained, {"validation": float(np.mean(answers)), "seconds": seconds}


def _answers(config, trained, seed, pairs, length) -> dict[str, float]:
    batch = sequences(config.task, seed, config.test_rows, pairs, length)
    return accuracy(trained, [batch])


@functools.lru_cache(maxsize=1)
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
        length = batch.tokens.shape[1]
        sized = comparison.for_length(model.config, length)
        hits = np.asarray(
            _hits(comparison.structure(sized), nnx.state(model, nnx.Param), batch)
        )
        mask = np.asarray(batch.mask)
        whole.append((hits | (mask == 0)).all(axis=1))
        right += float((hits * mask).sum())
        queried += float(mask.sum())
    return {"accuracy": float(np.concatenate(whole).mean()), "tokens": right / queried}


def summarise(rows: list[dict], base: str, length: int) -> list[dict]:
    """Share of right answers at one length by model and pairs, against a base."""
    flat = [
        {"name": row["name"], "seed": row["seed"]} | score
        for row in rows
        for score in row["scores"]
        if score["length"] == length
    ]
    return seed_report.summarise(flat, "tokens", base, "pairs")


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
            *(jax.random.fold_in(key, count), rows, count, length, vocab_size),
            fillers=fillers,
        )
        for count in pairs
    ]
    return Batch(*map(jnp.concatenate, zip(*parts, strict=True)))
