"""Trains on sequences that the device draws itself: many updates in one program.

Small models are trained in half the time that the loop of `memjax.training` takes,
which hands each batch over, reports, and saves. A run of seconds needs no checkpoints.
"""

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array

from memjax.data.batches.batch import Batch
from memjax.models import LanguageModel
from memjax.training import LoopConfig
from memjax.training import pretrain as run
from memjax.training.optimizer import make_optimizer
from memjax.training.step import init_train_state, make_train_step

# Updates of one call, between which an interrupt is heard.
PIECE = 100


def train(
    settings: run.RunConfig,
    draw: Callable[[Array, Array], Batch],
    start: LanguageModel | None = None,
) -> tuple[LanguageModel, float]:
    """The trained model and the seconds that it took.

    Args:
        settings: model, optimizer, updates and seed. Its data is not read.
        draw: (seed, step) -> the batch of an update; is compiled, and must be equal
            between calls that shall share a program.
        start: a model of these settings whose training goes on; None draws one.

    Raises:
        FloatingPointError: if an update was skipped because it was not finite.
    """
    began = time.monotonic()
    alike = LoopConfig(steps=settings.loop.steps)
    shared = dataclasses.replace(settings, seed=0, loop=alike)
    create, advance = _programs(shared, draw)
    state, skipped = create(jax.random.key(settings.seed), start), 0
    for first in range(0, settings.loop.steps, PIECE):
        updates = min(PIECE, settings.loop.steps - first)
        state, more = advance(state, settings.seed, updates)
        skipped += int(more)
    if skipped:
        raise FloatingPointError(f"{skipped} updates were not finite, and skipped")
    graph = nnx.graphdef(run.abstract_model(settings.model))
    return nnx.merge(graph, state.params), time.monotonic() - began


@functools.lru_cache(maxsize=2)
def _programs(settings: run.RunConfig, draw: Callable) -> tuple[Callable, Callable]:
    """How a state is drawn from a key, and many updates: the same for all seeds."""
    transform = make_optimizer(settings.optimizer, settings.loop.steps)
    update = make_train_step(
        run.abstract_model(settings.model), transform, settings.step
    )

    @jax.jit
    def create(key, start):
        model = LanguageModel(settings.model, key=key) if start is None else start
        rows = settings.data.batch_size
        return init_train_state(model, transform, settings.step, rows)

    @functools.partial(jax.jit, donate_argnums=0)
    def advance(state, seed, updates):
        def once(_, carry):
            state, skipped = carry
            state, metrics = update(state, draw(seed, state.step))
            return state, skipped + (metrics["finite"] == 0)

        return jax.lax.fori_loop(0, updates, once, (state, 0))

    return create, advance
