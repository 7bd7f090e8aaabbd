"""The documents of a run: its batches, and perplexity on those held out."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol, get_args

import numpy as np
from flax import nnx

from memjax import evaluation
from memjax.checks import check_sizes, require_known
from memjax.data import (
    BatchIterator,
    Split,
    TokenisedDocument,
    Tokenizer,
    chunked_batches,
    load_tokens,
    mixed_batches,
    packed_batches,
    streamed_batches,
)
from memjax.data.documents.sources import check_source
from memjax.models import ModelConfig
from memjax.models.base import Model
from memjax.models.language_model.inputs import start_multiple
from memjax.training.step import TrainState, model_of

Mode = Literal["chunked", "packed", "streamed"]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The documents of a run, and how they are cut into batches.

    Attributes:
        source: "embedded", "folder:PATH", "tfds:NAME", "hf:NAME", or "prepared:FOLDER",
            what `memjax data prepare` wrote with the same tokenizer.
        tokenizer: "bpe4k", "bytes", the path of a tokenizers JSON or of a folder that
            has one, or a repository of the Hugging Face hub, "owner/name".
        mode: "chunked" cuts documents into independent samples of `context_length`, as
            the paper does; "packed" puts several documents into one such row, each
            read as if alone; "streamed" reads whole documents, `context_length` tokens
            at a time, and needs `step.carry_memory`.
        context_length: tokens of a sample in one update.
        batch_size: samples of one update, over all devices.
        validation_texts: samples of `context_length` tokens in each evaluation.
        cache_dir: where tokens are kept; None is the user's cache folder.
        mixture: sources in place of `source`, each with its weight: its share of the
            tokens that are trained on, whatever its size; not for mode "streamed".
            Held-out documents are those of all of them, with no weights.
    """

    source: str = "embedded"
    tokenizer: str = "bpe4k"
    mode: Mode = "chunked"
    context_length: int = 2048
    batch_size: int = 8
    validation_texts: int = 16
    cache_dir: Path | None = None
    mixture: tuple[tuple[str, float], ...] = ()

    def __post_init__(self):
        require_known("mode", self.mode, get_args(Mode))
        check_sizes(
            context_length=self.context_length,
            batch_size=self.batch_size,
            validation_texts=self.validation_texts,
        )
        if self.mixture:
            self._check_mixture()

    @property
    def sources(self) -> tuple[str, ...]:
        """All sources of documents."""
        return tuple(name for name, _ in self.mixture) or (self.source,)

    def _check_mixture(self):
        for name, weight in self.mixture:
            if not name:
                raise ValueError(f"mixture has a weight of no source: {self.mixture}")
            if not 0 < weight < math.inf:
                raise ValueError(
                    f"the weight of {name!r} in mixture must be positive, got {weight}"
                )
        if len(set(self.sources)) < len(self.sources):
            raise ValueError(f"mixture names a source twice: {self.sources}")
        if self.source != "embedded":
            raise ValueError(
                f"source={self.source!r} has no part in a mixture: name it there, "
                "with its weight"
            )
        if self.mode == "streamed":
            raise ValueError(
                "a mixture needs mode='chunked' or 'packed', got 'streamed': a stream "
                "reads documents to their ends"
            )


class Settings(Protocol):
    """The part of a run's configuration that says which data it reads."""

    @property
    def language_model(self) -> ModelConfig: ...

    @property
    def data(self) -> DataConfig: ...

    @property
    def seed(self) -> int: ...


def load_split(
    config: Settings, tokenizer: Tokenizer, split: Split
) -> list[TokenisedDocument]:
    """The tokens of one split of the run's documents, of all its sources."""
    found = load_sources(config.data, tokenizer, split)
    return [document for documents in found for document in documents]


def load_sources(
    data: DataConfig, tokenizer: Tokenizer, split: Split
) -> list[list[TokenisedDocument]]:
    """The tokens of one split, source by source.

    Raises:
        ValueError: as `load_tokens`; a source that cannot be opened is named before
            any is read.
    """
    for name in data.sources:
        check_source(name)
    return [
        load_tokens(name, tokenizer, split, data.cache_dir) for name in data.sources
    ]


def batches(
    config: Settings,
    sources: Sequence[Sequence[TokenisedDocument]],
    part: tuple[int, int] = (0, 1),
) -> BatchIterator:
    """This host's part of the run's batches, in its order.

    Args:
        config: of the run.
        sources: the documents of each source, from `load_sources`.
        part: of each batch that this host reads, and of how many: `host_part`.
    """
    data, vocab_size = config.data, config.language_model.vocab_size
    shard = {"shard_index": part[0], "shard_count": part[1]}
    multiple = None
    if data.mode == "packed":
        multiple = start_multiple(config.language_model.mechanisms)
    if data.mixture:
        return mixed_batches(
            sources,
            [weight for _, weight in data.mixture],
            data.context_length,
            data.batch_size,
            config.seed,
            start_multiple=multiple,
            vocab_size=vocab_size,
            **shard,
        )
    (documents,) = sources
    return make_batches(
        data.mode,
        documents,
        data.context_length,
        data.batch_size,
        config.seed,
        vocab_size,
        start_multiple=multiple or 1,
        **shard,
    )


def make_batches(
    mode: Mode,
    documents: Sequence[TokenisedDocument],
    context_length: int,
    batch_size: int,
    seed: int,
    vocab_size: int,
    *,
    start_multiple: int = 1,
    shard_index: int,
    shard_count: int,
) -> BatchIterator:
    """The batches of a mode: `chunked_batches`, `packed_batches`, `streamed_batches`.

    Documents of packed rows begin at multiples of `start_multiple` tokens.
    """
    make = {
        "chunked": chunked_batches,
        "packed": functools.partial(packed_batches, start_multiple=start_multiple),
        "streamed": streamed_batches,
    }[mode]
    return make(
        documents,
        context_length,
        batch_size,
        seed,
        shard_index=shard_index,
        shard_count=shard_count,
        vocab_size=vocab_size,
    )


def shortest(mode: Mode, context_length: int) -> int:
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
        losses = evaluation.token_losses(
            trained,
            documents,
            context_length=length,
            segment=length,
            batch_size=min(config.data.batch_size, config.data.validation_texts),
            should_stop=should_stop,
        )
        # A model that reads ahead has seen some of the targets; those are no
        # predictions.
        losses = evaluation.drop_leaked_targets(trained, losses)
        return {
            "validation_perplexity": evaluation.perplexity(losses),
            "validation_perplexity_beyond_window": evaluation.perplexity(
                losses, first=window
            ),
        }

    return evaluate
