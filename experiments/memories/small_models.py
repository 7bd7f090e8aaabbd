"""Small models of equal parameters and equal state, that differ in one mechanism.

The width of the feed-forward layers makes up for the parameters of a mechanism; the
size of its memory is the one whose state comes nearest to the bytes given.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx

from experiments.lab.measure import tree_bytes
from memjax.mechanisms import AttentionConfig, MechanismConfig
from memjax.models import ModelConfig
from memjax.models.language_model.presets import Size
from memjax.training import LoopConfig, OptimizerConfig
from memjax.training import pretrain as run


class Scale(NamedTuple):
    """One size of model and training."""

    layers: int
    model_dim: int
    heads: int
    slots: int
    context_length: int
    tokens_per_update: int
    steps: int
    learning_rate: float


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

    def sized(mechanism):
        if isinstance(mechanism, AttentionConfig):
            return dataclasses.replace(mechanism, capacity=length)
        return mechanism

    return dataclasses.replace(model, mechanisms=tuple(map(sized, model.mechanisms)))


@functools.lru_cache(maxsize=256)
def parameters(model: ModelConfig) -> int:
    """Numbers that are learned."""
    params = nnx.state(run.abstract_model(model), nnx.Param)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def equal_parameters(
    models: Mapping[str, ModelConfig], scale: Scale
) -> dict[str, ModelConfig]:
    """Sets hidden_dim so that all come nearest to Transformer++ of this size.

    Raises:
        ValueError: if a mechanism alone has more parameters than that.
    """
    vocab_size = next(iter(models.values())).vocab_size
    goal = parameters(base_model(scale, vocab_size, "sliding_window", 1))
    equal = {}
    for name, model in models.items():
        each = 3 * model.model_dim * model.num_layers
        width = model.hidden_dim + round((goal - parameters(model)) / each)
        if width < 1:
            raise ValueError(f"{name} has more parameters than {goal} by itself")
        equal[name] = dataclasses.replace(model, hidden_dim=width)
    return equal


def equal_state(make: Callable[[int], ModelConfig], goal: int) -> ModelConfig:
    """The model whose state comes nearest to `goal` bytes.

    Args:
        make: a size of the memory, such as its slots -> the model; bytes grow with it.
        goal: bytes of a state, everything that is kept between two calls.

    Raises:
        ValueError: if the nearest is off by more than a tenth.
    """
    size = 1
    while state_bytes(make(size + 1)) <= goal:
        size += 1
    model = min(make(size), make(size + 1), key=lambda m: abs(state_bytes(m) - goal))
    if abs(state_bytes(model) - goal) > goal / 10:
        raise ValueError(
            f"no size gives a state of {goal} bytes within a tenth; the nearest has "
            f"{state_bytes(model)}, with {model.mechanisms[0]}"
        )
    return model


def state_bytes(model: ModelConfig) -> int:
    """Bytes of the state of a model with one kind of mechanism."""
    return model.num_layers * _mechanism_bytes(model.mechanisms[0])


@functools.lru_cache(maxsize=1024)
def _mechanism_bytes(mechanism: MechanismConfig) -> int:
    state = jax.eval_shape(lambda: mechanism.build().init_state(1))
    return tree_bytes(state)


def run_config(
    scale: Scale,
    model: ModelConfig,
    seed: int,
    *,
    warmup: float = 0.1,
    source: str = "embedded",
    tokenizer: str = "bpe4k",
) -> run.RunConfig:
    """One training of `scale`.

    Raises:
        ValueError: if the context length does not divide the tokens of an update.
    """
    rows, rest = divmod(scale.tokens_per_update, scale.context_length)
    if rows < 1 or rest:
        raise ValueError(
            f"context_length={scale.context_length} must divide the "
            f"{scale.tokens_per_update} tokens of an update"
        )
    # Few lines and few checkpoints: short runs save once, at their end.
    often = max(1, min(1000, scale.steps // 2))
    return run.RunConfig(
        model=model,
        data=run.DataConfig(
            source=source,
            tokenizer=tokenizer,
            context_length=scale.context_length,
            batch_size=rows,
        ),
        optimizer=OptimizerConfig(
            learning_rate=scale.learning_rate, warmup_ratio=warmup, final_ratio=0.1
        ),
        loop=LoopConfig(steps=scale.steps, save_every=1000, log_every=often, keep=1),
        seed=seed,
    )


@functools.lru_cache(maxsize=8)
def structure(model: ModelConfig):
    """One object for all seeds of a model: programs are compiled once for each."""
    return nnx.graphdef(run.abstract_model(model))
