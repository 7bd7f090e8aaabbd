"""Small models of equal parameters and equal memory, that differ in one mechanism.

The width of the feed-forward layers makes up for the parameters of a mechanism. The
size of its memory is given, or the one whose state comes nearest to the bytes given.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array

from experiments.lab import measure
from memjax.data.batches.batch import Batch
from memjax.mechanisms import AttentionConfig, MechanismConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.language_model.presets import Size
from memjax.status import Status
from memjax.training import OptimizerConfig
from memjax.training import pretrain as run
from memjax.training.optimizer import make_optimizer
from memjax.training.step import StepConfig, init_train_state, make_train_step

#: Updates of one call, between which an interrupt is heard.
PIECE = 25
#: Largest relative difference of two states that count as equal.
TOLERANCE = 0.1


class Scale(NamedTuple):
    """One size of model and training; the learning rate rises for `warmup` of it."""

    layers: int
    model_dim: int
    heads: int
    slots: int
    context_length: int
    tokens_per_update: int
    steps: int
    learning_rate: float
    warmup: float = 0.1


def base_model(
    scale: Scale, vocab_size: int, mechanism: str, length: int, **options: Any
) -> ModelConfig:
    """A model of this size with one mechanism in every layer; attention sees `length`.

    `options` are the mechanism's own, such as slots=8.
    """
    size = Size(
        num_layers=scale.layers,
        model_dim=scale.model_dim,
        num_heads=scale.heads,
        num_kv_heads=scale.heads,
        head_dim=scale.model_dim // scale.heads,
        hidden_dim=scale.model_dim * 8 // 3,
        window=length,
        capacity=length,
        slots=scale.slots,
        options={mechanism: options},
        dtype="float32",
        remat=False,
    )
    return size.model(mechanism, vocab_size=vocab_size)


def for_length(model: ModelConfig, length: int) -> ModelConfig:
    """The same model for sequences of `length` tokens, all of which attention keeps."""
    sized = [
        dataclasses.replace(mechanism, capacity=length)
        if isinstance(mechanism, AttentionConfig)
        else mechanism
        for mechanism in model.mechanisms
    ]
    return dataclasses.replace(model, mechanisms=tuple(sized))


@functools.lru_cache(maxsize=256)
def parameters(model: ModelConfig) -> int:
    """Numbers that are learned."""
    return measure.num_parameters(run.abstract_model(model))


def equal_parameters(model: ModelConfig, scale: Scale) -> ModelConfig:
    """Sets hidden_dim to come nearest to the parameters of Transformer++ of this size.

    Raises:
        ValueError: if the mechanism alone has more parameters.
    """
    goal = parameters(base_model(scale, model.vocab_size, "sliding_window", 1))
    each = 3 * model.model_dim * model.num_layers
    width = model.hidden_dim + round((goal - parameters(model)) / each)
    if width < 1:
        raise ValueError(
            f"model of {model.mechanisms[0].name} has {parameters(model)} parameters, "
            f"and no width of its feed-forward makes them {goal}"
        )
    return dataclasses.replace(model, hidden_dim=width)


def equal_state(make: Callable[[int], ModelConfig], goal: int) -> ModelConfig:
    """The model whose state comes nearest to `goal` bytes.

    `make` takes a size of the memory, such as its slots; bytes grow with it.

    Raises:
        ValueError: if one entry has more bytes, or the nearest size is not within
            `TOLERANCE` of them.
    """
    if (least := state_bytes(make(1))) > goal:
        raise ValueError(
            f"goal must be at least the {least} bytes of one entry, got {goal}"
        )
    size = 1
    while state_bytes(make(size + 1)) <= goal:
        size += 1
    near = {n: state_bytes(make(n)) for n in (size, size + 1)}
    best = min(near, key=lambda n: abs(near[n] - goal))
    if abs(near[best] - goal) > TOLERANCE * goal:
        raise ValueError(
            f"no size has a state within {TOLERANCE:.0%} of {goal} bytes: those of "
            f"{size} and {size + 1} have {near[size]} and {near[size + 1]}"
        )
    return make(best)


def state_bytes(model: ModelConfig) -> int:
    """Bytes of the state of a model with one kind of mechanism."""
    return model.num_layers * _mechanism_bytes(model.mechanisms[0])


@functools.lru_cache(maxsize=1024)
def _mechanism_bytes(mechanism: MechanismConfig) -> int:
    state = jax.eval_shape(lambda: mechanism.build().init_state(1))
    return measure.tree_bytes(state)


@functools.lru_cache(maxsize=8)
def structure(model: ModelConfig) -> nnx.GraphDef:
    """One object for all seeds of a model: programs are compiled once for each."""
    return nnx.graphdef(run.abstract_model(model))


def train(
    scale: Scale,
    model: ModelConfig,
    seed: int,
    draw: Callable[[Any, Array, Array], Batch],
    of: Hashable,
    start: LanguageModel | None = None,
) -> tuple[LanguageModel, float]:
    """The trained model and the CPU seconds that it took, compilation included.

    Sequences are drawn on the device, many updates in one program: half the time of
    the loop of `memjax.training`, which hands each batch over, reports, and saves.
    `draw` (of, seed, step) is compiled, once for calls whose `draw` and `of` are equal.
    `start` is a model whose training goes on.
    """
    began = time.process_time()
    # The rate is an argument of the program: those of a search share it.
    create, advance = _programs(scale._replace(learning_rate=1.0), model, draw, of)
    state, skipped = create(jax.random.key(seed), start), 0
    with Status("compiling, and training", "updates") as status:
        for first in range(0, scale.steps, PIECE):
            count = min(PIECE, scale.steps - first)
            state, (more, loss) = advance(state, seed, count, scale.learning_rate)
            skipped += int(more)
            status(first + count, scale.steps, f"loss {float(loss):.4f}")
    if skipped:
        raise FloatingPointError(f"{skipped} updates were not finite, and skipped")
    return nnx.merge(structure(model), state.params), time.process_time() - began


# Three stages of a model at most.
@functools.lru_cache(maxsize=3)
def _programs(
    scale: Scale, model: ModelConfig, draw: Callable, of: Hashable
) -> tuple[Callable, Callable]:
    """The initial state of a key, and many updates: the same for all seeds and rates.

    The rate of `scale` is 1; AdamW's updates are in proportion to it.
    """
    optimizer = OptimizerConfig(
        learning_rate=scale.learning_rate, warmup_ratio=scale.warmup, final_ratio=0.1
    )
    adamw, step = make_optimizer(optimizer, scale.steps), StepConfig()

    def at_rate(rate):
        return optax.chain(adamw, optax.scale(rate))

    @jax.jit
    def create(key, start):
        drawn = LanguageModel(model, key=key) if start is None else start
        rows = scale.tokens_per_update // scale.context_length
        return init_train_state(drawn, at_rate(1.0), step, rows)

    @functools.partial(jax.jit, donate_argnums=0)
    def advance(state, seed, updates, rate):
        update = make_train_step(run.abstract_model(model), at_rate(rate), step)

        def once(_, carry):
            state, (skipped, _) = carry
            state, metrics = update(state, draw(of, seed, state.step))
            return state, (skipped + (metrics["finite"] == 0), metrics["loss"])

        # The loss of the last update.
        return jax.lax.fori_loop(0, updates, once, (state, (0, jnp.float32(0))))

    return create, advance
