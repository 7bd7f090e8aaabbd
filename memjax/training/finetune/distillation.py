"""Layer-wise distillation of full attention into hybrid layers.

    loss = mean over layers of  Σ |y_t - y*_t|² / Σ |y*_t - mean y*|²      t >= window

y*_t is the output of a layer's full attention, y_t that of its window and memory for
the same input. Gradients stay within a layer, and the teacher (`teacher.py`) has none.
Differences to Zhang et al. (2024), LoLCATs, https://arxiv.org/abs/2410.10254, section
3.2: there the error is not divided by the variance, and the teacher is the full
model.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Scalar

from memjax.data.batches.batch import Batch
from memjax.mechanisms.sliding_window import whole as whole_window
from memjax.models import LanguageModel, ModelConfig
from memjax.models.language_model.retrofit import memory_layers
from memjax.models.language_model.teacher import run_teacher
from memjax.nnx.params import as_arrays
from memjax.training.step import Metrics, Step, TrainState, update

TeacherOutput = dict[str, list[Array]]


def make_distillation_steps(
    model: LanguageModel, teacher: ModelConfig, transform: optax.GradientTransformation
) -> tuple[Step, Step]:
    """Builds both halves of an update; jit them, donating the state.

    The first runs the teacher on a batch, without changing the state, and returns its
    outputs in place of metrics; the second trains on them. They do not change during
    training and can be cached: see `cached`.

    Metrics are those of `make_train_step`, and `window_loss`, the loss without the
    memories.

    Args:
        model: from `add_memory`; only its new parameters are trained.
        teacher: configuration of the model before `add_memory`.
        transform: of the trained parameters.
    """
    graph = nnx.graphdef(model)

    def student_of(params, frozen):
        return nnx.merge(graph, params, frozen)

    def read(state: TrainState, batch: Batch) -> tuple[TrainState, TeacherOutput]:
        student = student_of(state.params, state.frozen)
        return state, teacher_outputs(student, teacher, jnp.asarray(batch.tokens))

    def learn(state: TrainState, taught: TeacherOutput) -> tuple[TrainState, Metrics]:
        def loss(params):
            return distillation_loss(student_of(params, state.frozen), taught)

        gradient = jax.value_and_grad(loss, has_aux=True)
        (value, alone), gradients = gradient(state.params)
        after, metrics = update(transform, state, value, gradients)
        return after, metrics | {"window_loss": alone}

    return read, learn


def uncached(read: Step, learn: Step) -> Step:
    """One update of a batch."""
    return lambda state, batch: learn(*read(state, batch))


def cached(read: Step, learn: Step) -> Step:
    """One update by compiled halves; teacher outputs are cached in host memory."""
    found: dict[bytes, TeacherOutput] = {}

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        name = np.asarray(batch.tokens).tobytes()
        if name not in found:
            state, taught = read(state, batch)
            found[name] = {key: jax.device_get(taught[key]) for key in ("x", "y")}
        return learn(state, found[name])

    return step


def teacher_outputs(
    model: LanguageModel, teacher: ModelConfig, tokens: Int[Array, "B T"]
) -> TeacherOutput:
    """Inputs and full attention outputs of the hybrid layers in the teacher."""
    layers = memory_layers(model.config)
    taught = run_teacher(model, teacher, tokens, layers)
    return {"x": [taught[i].x for i in layers], "y": [taught[i].y for i in layers]}


def distillation_loss(
    model: LanguageModel, taught: TeacherOutput
) -> tuple[Scalar, Scalar]:
    """Mean over layers of the unexplained share of the full output's variance.

    Args:
        model: from `add_memory`.
        taught: from `teacher_outputs`.

    Returns:
        For window and memory, and for the window alone.
    """
    layers = memory_layers(model.config)
    pairs = zip(layers, taught["x"], taught["y"], strict=True)
    shares = [_both_missed(model, i, x, y) for i, x, y in pairs]
    own, alone = jnp.array(shares).mean(axis=0)
    return own, alone


def _both_missed(model, layer, x, y):
    """Unexplained share of one layer, with its memory and with its window alone."""
    block, window = model.blocks[layer], model.config.layers[layer].window
    params = as_arrays(block.mechanism)
    _, own = block.functions.apply(params, block.init_state(x.shape[0]), x)
    alone = whole_window(window, params.attention, x)
    return missed(own, y, window.window), missed(alone, y, window.window)


def missed(
    y: Float[Array, "B T D"], full: Float[Array, "B T D"], window: int
) -> Scalar:
    """Unexplained share of the full output's variance, beyond the window."""
    # Within the first window the memory is empty and attention is full.
    full = full[:, window:].astype(jnp.float32)
    error = y[:, window:].astype(jnp.float32) - full
    spread = full - full.mean(axis=(0, 1), keepdims=True)
    return (error**2).sum() / (spread**2).sum()
