"""The documents of a run: its batches, and perplexity on those held out."""

from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

import jax
import numpy as np
from flax import nnx

from memjax import evaluation
from memjax.data import (
    BatchIterator,
    Split,
    TokenisedDocument,
    Tokenizer,
    chunked_batches,
    load_tokens,
    streamed_batches,
)
from memjax.models import ModelConfig
from memjax.models.base import Model
from memjax.training.config import DataConfig
from memjax.training.step import TrainState, model_of


@runtime_checkable
class Settings(Protocol):
    """The part of a run's configuration that says which data it reads."""

    @property
    def model(self) -> ModelConfig: ...

    @property
    def data(self) -> DataConfig: ...

    @property
    def seed(self) -> int: ...


def load_split(
    config: Settings, tokenizer: Tokenizer, split: Split
) -> list[TokenisedDocument]:
    """The tokens of one split of the run's documents."""
    cache = config.data.cache_dir
    return load_tokens(config.data.source, tokenizer, split, cache)


def batches(config: Settings, documents: list[TokenisedDocument]) -> BatchIterator:
    """This host's part of the run's batches, in its order."""
    return make_batches(
        config.data.mode,
        documents,
        config.data.context_length,
        config.data.batch_size,
        config.seed,
        config.model.vocab_size,
        shard_index=jax.process_index(),
        shard_count=jax.process_count(),
    )


def make_batches(
    mode: Literal["chunked", "streamed"],
    documents: list[TokenisedDocument],
    context_length: int,
    batch_size: int,
    seed: int,
    vocab_size: int,
    *,
    shard_index: int,
    shard_count: int,
) -> BatchIterator:
    """The batches of a mode: see `chunked_batches` and `streamed_batches`."""
    make = {"chunked": chunked_batches, "streamed": streamed_batches}[mode]
    return make(
        documents,
        context_length,
        batch_size,
        seed,
        shard_index=shard_index,
        shard_count=shard_count,
        vocab_size=vocab_size,
    )


def shortest(mode: Literal["chunked", "streamed"], context_length: int) -> int:
    """Tokens of the shortest document that a mode reads: one more than its inputs."""
    return context_length + 1 if mode == "chunked" else 2


def validation(
    config: Settings, tokenizer: Tokenizer, model: Model
) -> Callable[[TrainState, Callable[[], bool]], dict[str, float]]:
    """Perplexity on a few texts from each validation document, of what is scored.

    `model` gives the structure alone.
    """
    length = config.data.context_length
    documents = load_split(config, tokenizer, "validation")
    # From every document, so that a long one does not stand for all.
    share = -(-config.data.validation_texts // len(documents))
    documents = [
        # One token more than is read: it is the last target.
        d._replace(tokens=np.asarray(d.tokens[: share * length + 1]))
        for d in documents
    ]
    # The structure alone: a model kept here would hold a second copy of the parameters.
    graph, window = nnx.graphdef(model), model.window

    def evaluate(state, should_stop):
        trained = model_of(graph, state)
        losses = evaluation.losses(
            trained,
            documents,
            context_length=length,
            segment=length,
            batch_size=min(config.data.batch_size, config.data.validation_texts),
            should_stop=should_stop,
        )
        # A model that reads ahead has seen some of the targets; those are no
        # predictions.
        losses = evaluation.causal(trained, losses)
        return {
            "validation_perplexity": evaluation.perplexity(losses),
            "validation_perplexity_beyond_window": evaluation.perplexity(
                losses, first=window
            ),
        }

    return evaluate
