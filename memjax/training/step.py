"""One update as a pure function: `train_step(state, batch) -> (state, metrics)`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, PyTree, Scalar

from memjax.checks import (
    check_numbers,
    check_seed,
    check_sizes,
    require_instance,
    require_known,
    short,
)
from memjax.data.batches.batch import Batch
from memjax.models import ModelConfig
from memjax.models.base import LONGEST, Model
from memjax.models.language_model.model import LanguageModel
from memjax.models.loss import last_positions, last_targets, loss_sum, scored_mask

Metrics = dict[str, Scalar]
LossOn = Literal["all", "last", "scored"]


class TrainState(NamedTuple):
    """The training state; a checkpoint stores all of it.

    Attributes:
        step: updates done, skipped ones included.
        params: trained parameters by path, float32: those that are `nnx.Param`.
        optimizer: the optimizer's state, of the trained parameters alone.
        memory: the memory state of each batch element if training carries it from
            batch to batch; else an empty tuple.
        frozen: all other variables of the model, by path. They never change; they are
            part of the state so that a checkpoint is complete.
    """

    step: Scalar
    params: PyTree
    optimizer: PyTree
    memory: PyTree
    frozen: PyTree


#: The update of a state by a batch, with its metrics.
Step = Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]
#: Makes a program of a pure update.
Compile = Callable[[Callable], Callable]


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """Settings of an update.

    Attributes:
        bptt_blocks: truncated backpropagation through this many blocks of the model's
            window, with the memory's value carried on; 0 does not truncate.
        accumulate: microbatches that a batch is split into; their gradients are
            summed. The update is the same and needs less device memory.
        carry_memory: keep each batch element's memory from one batch to the next, for
            streamed documents; batch elements marked `reset` start empty.
        loss_on: targets that count, of those the batch's mask lets through: "all";
            "last", each sample's last L, L the model's window (as HMT's official
            training, where gradients reach earlier tokens through the memory alone);
            "scored", those not leaked to their logits (HMT with retrieval: from index
            j of a segment on).
    """

    bptt_blocks: int = 0
    accumulate: int = 1
    carry_memory: bool = False
    loss_on: LossOn = "all"

    def __post_init__(self):
        require_known("loss_on", self.loss_on, get_args(LossOn))
        check_numbers(bptt_blocks=self.bptt_blocks, accumulate=self.accumulate)
        if self.bptt_blocks < 0:
            raise ValueError(f"bptt_blocks must be >= 0, got {self.bptt_blocks}")
        if self.accumulate < 1:
            raise ValueError(f"accumulate must be >= 1, got {self.accumulate}")


def check_run(mode: str, step: StepConfig, seed: int) -> None:
    """Raises ValueError where the data's mode contradicts the step, or for the seed."""
    if mode == "packed":
        _check_packed(step)
    if (mode == "streamed") != step.carry_memory:
        raise ValueError(
            f"data.mode={mode!r} contradicts step.carry_memory={step.carry_memory}: "
            "streams carry memory, samples do not"
        )
    check_seed(seed)


def _check_packed(step):
    """Raises ValueError on step settings that packed rows do not allow."""
    if step.bptt_blocks:
        raise ValueError(
            "packed rows are read whole: bptt_blocks must be 0 with them, got "
            f"{step.bptt_blocks}"
        )
    if step.loss_on != "all":
        raise ValueError(
            f"loss_on={step.loss_on!r} counts from the ends of a row, and a packed row "
            "has several documents: it must be 'all'"
        )


def init_train_state(
    model: Model,
    optimizer: optax.GradientTransformation,
    config: StepConfig,
    batch_size: int,
) -> TrainState:
    """The state before the first update.

    Raises:
        ValueError: on an argument of another kind, by name.
    """
    _check_kinds(model, optimizer, config)
    check_sizes(batch_size=batch_size)
    _, params, frozen = nnx.split(model, nnx.Param, ...)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        optimizer=optimizer.init(params),
        memory=model.init_state(batch_size, LONGEST) if config.carry_memory else (),
        frozen=frozen,
    )


def _check_kinds(model: Any, optimizer: Any, config: Any) -> None:
    require_instance("model", model, Model)
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(
            f"optimizer must be an optax.GradientTransformation, got {short(optimizer)}"
        )
    require_instance("config", config, StepConfig)


def model_of(graph: Any, state: TrainState) -> Any:
    """The model that a state holds, of the structure `nnx.graphdef(model)`."""
    return nnx.merge(graph, state.params, state.frozen)


def abstract_model(config: ModelConfig) -> LanguageModel:
    """The model with shapes for parameters: its structure, at no cost."""
    return nnx.merge(*_abstract(config))


@functools.lru_cache(maxsize=8)
def _abstract(config):
    return nnx.split(
        nnx.eval_shape(lambda: LanguageModel(config, key=jax.random.key(0)))
    )


def make_train_step(
    model: Model, optimizer: optax.GradientTransformation, config: StepConfig
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Builds the update of one model; jit it, donating the state.

    If loss or gradients are not finite, parameters and optimizer stay as they are and
    the metric `finite` is 0. Carried memories are reset all the same, as the next batch
    continues the documents that start in this one.

    A carried memory that is not finite is reset, and so is one that a skipped step
    makes not finite while others stay finite: it would make every step until the end of
    its document a skipped one.

    Packed rows, with `reset` [B, T], need a `LanguageModel`.

    Metrics: `loss` in nats per token, `gradient_norm` before clipping, `finite`.

    Raises:
        ValueError: on an argument of another kind, by name.
    """
    _check_kinds(model, optimizer, config)
    graph = nnx.graphdef(model)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        if batch.reset.ndim == 2:
            check_run("packed", config, 0)
            if model.backbone is not model:
                raise ValueError(
                    "packed rows need a LanguageModel, which clears its memory inside "
                    f"a row, got {type(model).__name__}"
                )
        scored_batch = batch._replace(mask=_loss_mask(model, config, batch.mask))
        if not config.carry_memory:
            # A cache for a full sequence has one slot per token.
            memory = model.init_state(*batch.tokens.shape)
            loss, _, gradients = _gradients(graph, config, state, memory, scored_batch)
            return update(optimizer, state, loss, gradients)
        # With the current parameters: an empty memory may be learned.
        empty = model_of(graph, state).reset
        before = empty(state.memory, batch.reset | not_finite(state.memory))
        loss, after, gradients = _gradients(graph, config, state, before, scored_batch)
        bad = not_finite(after)
        # If all are bad, the cause is the parameters or the device.
        kept = empty(before, bad & ~bad.all())
        new, metrics = update(optimizer, state, loss, gradients)
        memory = _select(metrics["finite"] == 1, after, kept)
        return new._replace(memory=memory), metrics

    return train_step


def not_finite(memory: PyTree) -> Bool[Array, " B"]:
    """Batch elements with a number in their memory that is not finite."""
    elements = [
        ~jnp.isfinite(leaf).reshape(leaf.shape[0], -1).all(axis=1)
        for leaf in jax.tree.leaves(memory)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    return functools.reduce(jnp.logical_or, elements, jnp.zeros((), bool))


def update(
    optimizer: optax.GradientTransformation,
    state: TrainState,
    loss: Scalar,
    gradients: PyTree,
) -> tuple[TrainState, Metrics]:
    """The state after a step, but with the old memory; and its metrics.

    Args:
        optimizer: as the state was made with.
        state: before the step.
        loss: the loss of the step; if it or a gradient is not finite, parameters and
            optimizer stay as they are.
        gradients: of the loss with respect to `state.params`.
    """
    norm = optax.tree.norm(gradients)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    updates, new_optimizer = optimizer.update(gradients, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    new = state._replace(
        step=state.step + 1,
        params=_select(finite, params, state.params),
        optimizer=_select(finite, new_optimizer, state.optimizer),
    )
    metrics = {
        "loss": loss,
        "gradient_norm": norm,
        "finite": finite.astype(jnp.float32),
    }
    return new, metrics


def _select(condition, new, old):
    """One of two trees; not by a product with 0, as 0 * NaN is NaN."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def _loss_mask(model, config, mask):
    """The mask of the batch, set to zero where `loss_on` excludes a target."""
    match config.loss_on:
        case "last":
            return last_targets(mask, model.window)
        case "scored":
            t = mask.shape[1]
            # In a stream the rule follows segments, which must not straddle two
            # batches.
            first = model.first_scored
            if first and config.carry_memory and t % model.window:
                raise ValueError(
                    f"loss_on='scored' needs batches of whole segments of "
                    f"{model.window} tokens in a stream, got {t} tokens"
                )
            return mask * scored_mask(t, model.window, first)[None]
        case _:
            return mask


def _gradients(graph, config, state, memory, batch):
    """Mean loss over the batch, the memory after it, and the gradients."""
    num_microbatches = config.accumulate
    if batch.tokens.shape[0] % num_microbatches:
        raise ValueError(
            f"accumulate={num_microbatches} must divide the batch of "
            f"{batch.tokens.shape[0]} rows"
        )
    grad = jax.value_and_grad(
        functools.partial(_total_loss, graph, config, state.frozen), has_aux=True
    )
    if num_microbatches == 1:
        (nll, (tokens, memory)), gradients = grad(state.params, memory, batch)
    else:
        # Microbatch i takes rows i, i + n, ...: every microbatch keeps the batch's
        # sharding, where consecutive rows would be on some devices only.
        def split(x):
            return x.reshape(-1, num_microbatches, *x.shape[1:]).swapaxes(0, 1)

        def merge(x):
            return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])

        def add_microbatch(total, inputs):
            (nll, (tokens, memory)), gradients = grad(state.params, *inputs)
            return jax.tree.map(jnp.add, total, (nll, tokens, gradients)), memory

        zero = (
            jnp.zeros(()),
            jnp.zeros(()),
            jax.tree.map(jnp.zeros_like, state.params),
        )
        inputs = jax.tree.map(split, (memory, batch))
        (nll, tokens, gradients), memory = jax.lax.scan(add_microbatch, zero, inputs)
        memory = jax.tree.map(merge, memory)
    # Sums are divided once by the tokens of the whole batch, so that the update does
    # not depend on `accumulate`. A batch without targets has loss 0, not 0 / 0.
    tokens = jnp.maximum(tokens, 1.0)
    return nll / tokens, memory, jax.tree.map(lambda g: g / tokens, gradients)


def _total_loss(graph, config, frozen, params, memory, batch):
    """Summed loss; no gradient flows through the memory past `bptt_blocks`."""
    model: Model = nnx.merge(graph, params, frozen)
    backbone: LanguageModel = model.backbone
    t = batch.tokens.shape[1]
    # 0 blocks cut nothing: one window of the whole sequence.
    window = min(t, config.bptt_blocks * model.window) or t

    def read(memory, tokens):
        if batch.reset.ndim == 2:
            return memory, backbone.encode_packed(backbone.embed(tokens), batch.reset)
        if backbone is model and window == t and not config.carry_memory:
            # Nothing is read on from here, so that no memory has to be kept.
            return memory, backbone.encode(backbone.embed(tokens))
        return model.features(memory, tokens)

    def block_loss(memory, inputs):
        tokens, targets, mask = inputs
        # Cuts the gradient between blocks. The first block's memory is of an earlier
        # batch, which has no gradient either.
        memory, features = read(jax.lax.stop_gradient(memory), tokens)
        if config.loss_on == "last":
            # The output head is the widest product: only these positions need it.
            positions = last_positions(mask, model.window)
            features = jnp.take_along_axis(features, positions[..., None], axis=1)
            targets = jnp.take_along_axis(targets, positions, axis=1)
            mask = jnp.take_along_axis(mask, positions, axis=1)
        nll = loss_sum(model.logits, features, targets, mask, model.vocab_size)
        return memory, (nll, mask.sum())

    inputs = (batch.tokens, batch.targets, batch.mask)
    if window == t:
        memory, (nll, tokens) = block_loss(memory, inputs)
        # The next batch starts from the memory's value, without a gradient through this
        # one.
        return nll, (tokens, jax.lax.stop_gradient(memory))
    if t % window:
        raise ValueError(
            f"bptt_blocks={config.bptt_blocks} of {model.window} tokens must "
            f"divide the context of {t}"
        )

    def split(x):
        return jnp.moveaxis(x.reshape(x.shape[0], -1, window), 1, 0)

    memory, sums = jax.lax.scan(block_loss, memory, jax.tree.map(split, inputs))
    nll, tokens = (x.sum() for x in sums)
    return nll, (tokens, jax.lax.stop_gradient(memory))
