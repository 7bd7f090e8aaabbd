"""Training steps of M+ on its tasks, as pure functions, and the first state.

A step takes an element of `TaskBatches`. Each task has its own program, compiled at its
first occurrence.
"""

from collections.abc import Callable
from typing import get_args

import jax
import optax
from flax import nnx
from jaxtyping import PRNGKeyArray

from memjax.data.mplus_tasks.tasks import Task, TaskBatch
from memjax.models.mplus.model import MPlus
from memjax.training.mplus.tasks import first_memory, healed, task_loss
from memjax.training.step import (
    Metrics,
    StepConfig,
    TrainState,
    init_train_state,
    model_of,
    not_finite,
    update,
)

TaskStep = Callable[[TrainState, TaskBatch], tuple[TrainState, Metrics]]


def init_task_state(
    model: MPlus,
    optimizer: optax.GradientTransformation,
    batch: int,
    target: int,
    key: PRNGKeyArray,
) -> TrainState:
    """The state before the first step; see `tasks.first_memory`."""
    state = init_train_state(model, optimizer, StepConfig(), batch)
    return state._replace(memory=first_memory(model, batch, target, key))


def make_task_steps(
    model: MPlus, optimizer: optax.GradientTransformation, prompt: int
) -> dict[Task, TaskStep]:
    """Builds the training step of each task; jit them, donating the state.

    Args:
        model: of the state.
        optimizer: as of the state.
        prompt: see `tasks.task_loss`.

    A memory that is not finite is reset. A step with loss or gradients that are not
    finite changes neither parameters nor optimizer; its memory is carried on.

    Metrics besides those of `make_train_step`: the nats per token of the task, as
    `<task>_loss`, and `retriever_loss` where the task has it; `loss` is their sum.

    Raises:
        ValueError: for a model with legacy ages, which do not say which document a row
            is of, or with memory on the host.
    """
    if model.config.legacy:
        raise ValueError("legacy must be False in training: its ages begin at the drop")
    for name in ("store_memory", "pool_memory"):
        if (place := getattr(model.config, name)) != "device":
            raise ValueError(
                f"{name} must be 'device' in training, whose steps write and then read "
                f"it, got {place!r}"
            )
    graph = nnx.graphdef(model)

    def make(task: Task) -> TaskStep:
        def step(state: TrainState, batch: TaskBatch) -> tuple[TrainState, Metrics]:
            bad = not_finite(state.memory)
            before = healed(model_of(graph, state), state.memory, bad)

            def loss(params):
                model = model_of(graph, state._replace(params=params))
                return task_loss(model, task, before, batch, prompt)

            grad = jax.value_and_grad(loss, has_aux=True)
            # By the trained parameters alone: memory and backbone are closed over.
            (total, (memory, losses)), gradients = grad(state.params)
            new, metrics = update(optimizer, state, total, gradients)
            # Not selected by `finite`: a store is tens of gigabytes, and a second copy
            # from before the step would be needed.
            new = new._replace(memory=memory)
            # By task, as losses of different tasks cannot be compared.
            metrics[f"{task}_loss"] = losses.language
            if losses.retriever is not None:
                metrics["retriever_loss"] = losses.retriever
            return new, metrics

        return step

    return {task: make(task) for task in get_args(Task)}
