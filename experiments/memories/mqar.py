"""Multi-query associative recall (MQAR): small models learn it and are tested on it.

A sequence names key-value pairs, then asks for the value of every key (Zoology). Filler
between the questions has ids of its own: it never repeats a key. Models are trained at
one length, and tested on other sequences at this and greater ones. All have equal
parameters and a state of as many bytes as DeltaNet's of this size; they see equal
sequences in equal order.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool

from experiments.lab.intervals import summarise_seeds
from experiments.memories import small_models
from experiments.memories.small_models import Scale
from memjax.data import multi_query_recall
from memjax.data.batches.batch import Batch
from memjax.models import LanguageModel, ModelConfig
from memjax.models.language_model.presets import RECURRENT

# Seeds of the sequences that choose and of those that test, which no training has.
VALIDATION, TEST = 2**32 - 2, 2**32 - 1


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


SMALL = Task(
    # Attention that reaches its peak learning rate sooner does not learn the task.
    scale=Scale(2, 32, 2, 8, 64, 36 * 64, 1500, 1e-2, warmup=0.3),
    # 65 keys: with 79 full attention did not learn the task in as many updates.
    vocab_size=196,
    fillers=64,
    pairs=(4, 8, 16),
    tested=(4, 8, 16, 32, 64),
    lengths=(64, 256, 1024),
)

#: The sizes of a mechanism that make its state as large as DeltaNet's, all one number.
#: Memories are square, as in the papers: as many slots as a key is wide.
SIZES = {
    "attention": (),
    "sliding_window": ("window",),
    "gsa": ("slots", "key_dim", "value_dim"),
    "abc": ("slots", "key_dim", "value_dim"),
    "trellis": ("slots", "key_dim", "value_dim"),
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
    make = functools.partial(
        small_models.base_model,
        task.scale,
        task.vocab_size,
        mechanism,
        task.scale.context_length,
        **options,
    )
    names = SIZES.get(mechanism, ("key_dim", "value_dim"))
    if not names:
        return make()
    goal = small_models.base_model(task.scale, task.vocab_size, "deltanet", 1)
    return small_models.equal_state(
        lambda size: make(**dict.fromkeys(names, size)), small_models.state_bytes(goal)
    )


def batch(task: Task, seed: int | Array, step: int | Array) -> Batch:
    """The sequences of one update, as many of each number of pairs."""
    length = task.scale.context_length
    rows = task.scale.tokens_per_update // length // len(task.pairs)
    key = jax.random.fold_in(jax.random.key(seed), step)
    return _draw(key, rows, task.pairs, length, task.vocab_size, task.fillers)


def sequences(task: Task, seed: int, rows: int, pairs: int, length: int) -> Batch:
    """Sequences that no training has; those of a seed are the same for all models."""
    key = jax.random.fold_in(jax.random.key(seed), length)
    return _draw(key, rows, (pairs,), length, task.vocab_size, task.fillers)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _draw(
    key, rows: int, pairs: tuple[int, ...], length: int, vocab_size: int, fillers: int
) -> Batch:
    """`rows` sequences of each number of pairs."""
    parts = []
    for count in pairs:
        own = jax.random.fold_in(key, count)
        parts.append(
            multi_query_recall(own, rows, count, length, vocab_size, fillers=fillers)
        )
    return Batch(*map(jnp.concatenate, zip(*parts, strict=True)))


def measure(task: Task, model: ModelConfig, seed: int, rows: int) -> dict[str, Any]:
    """Trains; then the share of right answers by pairs and by length of the sequence.

    `validation` is that of sequences which choose between models, and are no test.
    Each number is of `rows` sequences.
    """
    trained, seconds = small_models.train(task.scale, model, seed, _drawing(task))

    def answers(seed: int, pairs: int, length: int) -> float:
        return accuracy(trained, sequences(task, seed, rows, pairs, length))

    length = task.scale.context_length
    validation = [answers(VALIDATION, pairs, length) for pairs in task.pairs]
    scores = [
        {"pairs": pairs, "length": length, "tokens": answers(TEST, pairs, length)}
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


def accuracy(model: LanguageModel, batch: Batch) -> float:
    """Share of right answers."""
    # The parameters at another length: attention has a cache of that length.
    sized = small_models.for_length(model.config, batch.tokens.shape[1])
    graph, params = small_models.structure(sized), nnx.state(model, nnx.Param)
    hits, mask = np.asarray(_hits(graph, params, batch)), np.asarray(batch.mask)
    return float((hits * mask).sum() / mask.sum())


@functools.partial(jax.jit, static_argnums=0)
def _hits(graph, params, batch: Batch) -> Bool[Array, "B T"]:
    """Where the likeliest token is the target."""
    model = nnx.merge(graph, params)
    _, logits = model(model.init_state(batch.tokens.shape[0]), batch.tokens)
    return logits.argmax(axis=-1) == batch.targets


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
