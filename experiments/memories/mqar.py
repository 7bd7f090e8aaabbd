"""Multi-query associative recall (MQAR): small models learn it and are tested on it.

A sequence names key-value pairs, then asks for the value of every key (Zoology). Filler
between the questions has ids of its own: it never repeats a key. Models are trained at
one length, and tested on other sequences at this and greater ones. All have equal
parameters and see equal sequences in equal order. Their memories are made equal in one
of two ways: in width, as the papers compare, or in the bytes of their states.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool

from experiments.memories import small_models
from experiments.memories.small_models import Scale
from memjax.data import multi_query_recall
from memjax.data.batches.batch import Batch
from memjax.models import LanguageModel, ModelConfig

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

    @property
    def width(self) -> int:
        """Of the model's heads, and of all memories where widths are equal."""
        return self.scale.model_dim // self.scale.heads


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

#: The sizes of a mechanism that are its width, all one number. Memories are square, as
#: in the papers: as many slots as a key is wide.
WIDTHS = {
    "attention": (),
    "sliding_window": (),
    "gsa": ("slots", "key_dim", "value_dim"),
    "abc": ("slots", "key_dim", "value_dim"),
    "trellis": ("slots", "key_dim", "value_dim"),
    "lattice": ("slots", "value_dim"),
}


def of_width(task: Task, mechanism: str, width: int, **options: Any) -> ModelConfig:
    """A model with this mechanism in every layer, its heads' memories of this width.

    Full attention keeps all tokens, in heads of the model's own width. `options` are
    the mechanism's own.

    Raises:
        ValueError: if the memory of the mechanism has no width to set.
    """
    names, own = WIDTHS.get(mechanism, ("key_dim", "value_dim")), task.width
    if not names and width != own:
        raise ValueError(
            f"width must be {own} for {mechanism}, whose memory is tokens, got {width}"
        )
    length = task.scale.context_length
    sizes = dict.fromkeys(names, width) | options
    return small_models.base_model(
        task.scale, task.vocab_size, mechanism, length, **sizes
    )


def of_bytes(task: Task, mechanism: str, budget: int, **options: Any) -> ModelConfig:
    """The same with the width whose state comes nearest to `budget` bytes.

    Of sliding windows it is the tokens that are chosen.

    Raises:
        ValueError: if no width comes near, or the budget is smaller than one entry.
    """

    def make(size: int) -> ModelConfig:
        if mechanism == "sliding_window":
            return of_width(task, mechanism, task.width, window=size, **options)
        return of_width(task, mechanism, size, **options)

    if mechanism == "attention":
        raise ValueError("attention keeps all tokens: its bytes cannot be chosen")
    return small_models.equal_state(make, budget)


def budget(task: Task) -> int:
    """Bytes of the state of DeltaNet with the width of the model's heads."""
    return small_models.state_bytes(of_width(task, "deltanet", task.width))


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


def measure(
    task: Task, model: ModelConfig, rate: float, seed: int, rows: int
) -> dict[str, Any]:
    """Trains; then the share of right answers by pairs and by length of the sequence.

    `validation` is that of sequences which choose between models, by the pairs of the
    training, and are no test. Each number is of `rows` sequences.

    Raises:
        FloatingPointError: if the training diverges.
    """
    scale = task.scale._replace(learning_rate=rate)
    trained, seconds = small_models.train(scale, model, seed, batch, task)

    def answers(seed: int, pairs: int, length: int) -> float:
        return accuracy(trained, sequences(task, seed, rows, pairs, length))

    length = task.scale.context_length
    scores = [
        {"pairs": pairs, "length": length, "tokens": answers(TEST, pairs, length)}
        for length in task.lengths
        for pairs in task.tested
        if length >= 4 * pairs
    ]
    return {
        "validation": [answers(VALIDATION, pairs, length) for pairs in task.pairs],
        "cpu_seconds": seconds,
        "scores": scores,
    }


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
