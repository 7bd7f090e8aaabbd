"""Aligns memories with the full attention whose place they take, layer by layer.

    loss = mean over layers of  Σ |y_t - y*_t|² / Σ |y*_t - mean y*|²      t >= window

y*_t is the output of a layer's full attention, y_t that of its window and memory for
the same input. The full model runs forward alone: no gradient leaves a layer. Zhang et
al. (2024), LoLCATs, https://arxiv.org/abs/2410.10254, section 3.2, whose error is not
divided by the variance.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Scalar

from memjax.data.batches.batch import Batch
from memjax.mechanisms.sliding_window import whole as whole_window
from memjax.models import LanguageModel, ModelConfig
from memjax.models.language_model.retrofit import memory_layers
from memjax.models.language_model.teacher import teach
from memjax.nnx.params import as_arrays
from memjax.training.step import Metrics, TrainState, update


def make_align_step(
    model: LanguageModel, teacher: ModelConfig, transform: optax.GradientTransformation
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Builds the update of one batch; jit it, donating the state.

    Metrics are those of `make_train_step`, and `window_loss`: what the loss would be
    without the memories.

    Args:
        model: that `retrofit` made, whose new parameters alone are trained.
        teacher: configuration of the model that it was made of.
        transform: of the trained parameters.
    """
    graph = nnx.graphdef(model)

    def align_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        def loss(params):
            student = nnx.merge(graph, params, state.frozen)
            return alignment_loss(student, teacher, jnp.asarray(batch.tokens))

        gradient = jax.value_and_grad(loss, has_aux=True)
        (value, alone), gradients = gradient(state.params)
        after, metrics = update(transform, state, value, (), gradients)
        return after, metrics | {"window_loss": alone}

    return align_step


def alignment_loss(
    model: LanguageModel, teacher: ModelConfig, tokens: Int[Array, "B T"]
) -> tuple[Scalar, Scalar]:
    """Mean over layers of the share of the full output's variance that is missed.

    Returns:
        Of window and memory, and of the window alone.
    """
    layers = memory_layers(model.config)
    taught = teach(model, teacher, tokens, layers)
    missed = [_both_missed(model, i, *taught[i]) for i in layers]
    own, alone = jnp.array(missed).mean(axis=0)
    return own, alone


def _both_missed(model, layer, x, y):
    """What one layer misses with its memory, and with its window alone."""
    block, window = model.blocks[layer], model.config.layers[layer].window
    params = as_arrays(block.mixer)
    _, own = block.mechanism.apply(params, block.init_state(x.shape[0]), x)
    alone = whole_window(window, params.attention, x)
    return _missed(own, y, window.window), _missed(alone, y, window.window)


def _missed(
    y: Float[Array, "B T D"], full: Float[Array, "B T D"], window: int
) -> Scalar:
    """Share of the full output's variance, over the tokens beyond the window."""
    # Before, the memory is empty and the window sees everything.
    full = full[:, window:].astype(jnp.float32)
    error = y[:, window:].astype(jnp.float32) - full
    spread = full - full.mean(axis=(0, 1), keepdims=True)
    return (error**2).sum() / (spread**2).sum()
