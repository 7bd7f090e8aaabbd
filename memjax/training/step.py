"""One update as a pure function: `train_step(state, batch) -> (state, metrics)`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import PyTree, Scalar

from memjax.data.batch import Batch
from memjax.models.language_model import LanguageModel
from memjax.training.loss import token_losses

Metrics = dict[str, Scalar]


class TrainState(NamedTuple):
    """All that a checkpoint holds of the computation.

    Attributes:
        step: updates done, skipped ones included.
        params: parameters by path, float32.
        optimizer: the optimizer's state.
        memory: each row's memory, where training carries it from batch to batch; else
            an empty tuple.
    """

    step: Scalar
    params: PyTree
    optimizer: PyTree
    memory: PyTree


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """How a batch becomes one update.

    Attributes:
        bptt_blocks: gradients flow back through this many blocks of the model's
            window and are cut there, the memory going on; 0 is through all.
        accumulate: parts of the batch, each rows/accumulate, whose gradients are
            summed: less memory, the same update.
        carry_memory: keep each row's memory from one batch to the next, for streams;
            rows marked `reset` start empty.
    """

    bptt_blocks: int = 0
    accumulate: int = 1
    carry_memory: bool = False

    def __post_init__(self):
        if self.bptt_blocks < 0:
            raise ValueError(f"bptt_blocks must be >= 0, got {self.bptt_blocks}")
        if self.accumulate < 1:
            raise ValueError(f"accumulate must be >= 1, got {self.accumulate}")


def init_train_state(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    config: StepConfig,
    batch_size: int,
) -> TrainState:
    """The state before the first update."""
    params = nnx.state(model, nnx.Param)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        optimizer=optimizer.init(params),
        memory=model.init_state(batch_size) if config.carry_memory else (),
    )


def make_train_step(
    model: LanguageModel, optimizer: optax.GradientTransformation, config: StepConfig
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Builds the update of one model; jit it, donating the state.

    A batch whose loss or gradients are not finite changes nothing but the step: the
    metrics then say `finite` 0.

    Metrics: `loss` in nats per token, `gradient_norm` before clipping, `finite`.
    """
    graph = nnx.graphdef(model)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        empty = model.init_state(batch.tokens.shape[0])
        memory = empty
        if config.carry_memory:
            memory = nnx.merge(graph, state.params).reset(state.memory, batch.reset)
        loss, memory, gradients = _gradients(graph, config, state, memory, batch)
        norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        updates, new_optimizer = optimizer.update(
            gradients, state.optimizer, state.params
        )
        new = TrainState(
            step=state.step,
            params=optax.apply_updates(state.params, updates),
            optimizer=new_optimizer,
            memory=memory if config.carry_memory else (),
        )
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
        new = new._replace(step=state.step + 1)
        metrics = {
            "loss": loss,
            "gradient_norm": norm,
            "finite": finite.astype(jnp.float32),
        }
        return new, metrics

    return train_step


def _gradients(graph, config, state, memory, batch):
    """The mean loss over the batch, the memory after it, and gradients, by parts."""
    parts = config.accumulate
    if batch.tokens.shape[0] % parts:
        raise ValueError(
            f"accumulate={parts} must divide the batch of {batch.tokens.shape[0]} rows"
        )
    grad = jax.value_and_grad(
        functools.partial(_total_loss, graph, config), has_aux=True
    )
    if parts == 1:
        (nll, (tokens, memory)), gradients = grad(state.params, memory, batch)
    else:
        # Rows are dealt out like cards: every part keeps the rows' sharding.
        deal = lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)
        gather = lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:])

        def part(total, piece):
            (nll, (tokens, memory)), gradients = grad(state.params, *piece)
            return jax.tree.map(jnp.add, total, (nll, tokens, gradients)), memory

        zero = (
            jnp.zeros(()),
            jnp.zeros(()),
            jax.tree.map(jnp.zeros_like, state.params),
        )
        pieces = jax.tree.map(deal, (memory, batch))
        (nll, tokens, gradients), memory = jax.lax.scan(part, zero, pieces)
        memory = jax.tree.map(gather, memory)
    tokens = jnp.maximum(tokens, 1.0)
    return nll / tokens, memory, jax.tree.map(lambda g: g / tokens, gradients)


def _total_loss(graph, config, params, memory, batch):
    """Summed loss, with the memory cut from the gradient every `bptt_blocks`."""
    model: Any = nnx.merge(graph, params)
    t = batch.tokens.shape[1]
    window = min(t, config.bptt_blocks * model.window) or t

    def piece(memory, item):
        tokens, targets, mask = item
        memory, features = model.features(jax.lax.stop_gradient(memory), tokens)
        losses = token_losses(model.logits, features, targets, model.vocab_size)
        return memory, ((losses * mask).sum(), mask.sum())

    items = (batch.tokens, batch.targets, batch.mask)
    if window == t:
        memory, (nll, tokens) = piece(memory, items)
        return nll, (tokens, jax.lax.stop_gradient(memory))
    if t % window:
        raise ValueError(
            f"bptt_blocks={config.bptt_blocks} of {model.window} tokens must "
            f"divide the context of {t}"
        )
    split = lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, window), 1, 0)
    memory, sums = jax.lax.scan(piece, memory, jax.tree.map(split, items))
    nll, tokens = (x.sum() for x in sums)
    return nll, (tokens, jax.lax.stop_gradient(memory))
