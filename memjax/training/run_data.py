"""Documents of a run: batches for training, perplexity for validation."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol, get_args, runtime_checkable

import jax
import numpy as np
from flax import nnx

from memjax import evaluation
from memjax.checks import check_sizes, require_known
from memjax.data import (
    BatchIterator,
    RowConfig,
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
from memjax.status import Status
from memjax.training.step import TrainState, model_of

#: Of the papers, for messages.
PAPER_DATA = (
    "--data.source PATH, or as the papers: tfds:pg19, hf:allenai/c4:en, "
    "hf:HuggingFaceFW/fineweb-edu:sample-100BT"
)
Mode = Literal["chunked", "packed", "streamed"]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Sources of documents, and sizes of batches.

    Attributes:
        source: "embedded", the path of a file or folder, "tfds:NAME", "hf:NAME:CONFIG",
            "hf:NAME:CONFIG:SPLIT" with "train[:1%]" as a split, or "prepared:FOLDER",
            from `memjax data prepare` with the same tokenizer.
        tokenizer: "bpe4k", "bytes", the path of a tokenizers JSON or of a folder that
            has one, or a repository of the Hugging Face hub, "owner/name".
        mode: "chunked" cuts documents into independent samples of `context_length`, as
            the paper does; "packed" puts several documents into one such row, each
            read as if alone; "streamed" reads whole documents, `context_length` tokens
            at a time, and needs `step.carry_memory`.
        context_length: tokens of a sample in one update.
        batch_size: samples of one update, over all devices.
        validation_texts: samples of `context_length` tokens in each evaluation.
        cache_dir: cache of tokens; None is the user's cache folder.
        mixture: sources in place of `source`, each with its weight, its share of the
            training tokens whatever its size; not for mode "streamed". Held-out
            documents are those of all sources, without weights.
        column: key or column with the text; None takes "text" or the like.
        sample_epochs: most times that a run may read the embedded documents; the
            presets of papers need data like the papers'.
        join: rows of a source that become one document: a number, "blank" or
            "articles"; see `memjax.data.RowConfig`. None: each is one.
    """

    source: str = "embedded"
    tokenizer: str = "bpe4k"
    mode: Mode = "chunked"
    context_length: int = 2048
    batch_size: int = 8
    validation_texts: int = 16
    cache_dir: Path | None = None
    mixture: tuple[tuple[str, float], ...] = ()
    column: str | None = None
    join: str | None = None
    sample_epochs: int = 100

    def __post_init__(self):
        require_known("mode", self.mode, get_args(Mode))
        check_sizes(
            context_length=self.context_length,
            batch_size=self.batch_size,
            validation_texts=self.validation_texts,
            sample_epochs=self.sample_epochs,
        )
        RowConfig(self.column, self.join)
        if self.mixture:
            self._check_mixture()

    @property
    def sources(self) -> tuple[str, ...]:
        """All sources of documents."""
        return tuple(name for name, _ in self.mixture) or (self.source,)

    @property
    def rows(self) -> RowConfig:
        """How rows of the sources become documents."""
        return RowConfig(self.column, self.join)

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


@runtime_checkable
class Settings(Protocol):
    """Data settings of a run."""

    @property
    def language_model(self) -> ModelConfig: ...

    @property
    def data(self) -> DataConfig: ...

    @property
    def seed(self) -> int: ...


def load_split(
    config: Settings, tokenizer: Tokenizer, split: Split
) -> list[TokenisedDocument]:
    """Tokens of one split of the documents of all sources."""
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
        check_source(name, data.rows)
    return [
        load_tokens(name, tokenizer, split, data.cache_dir, data.rows)
        for name in data.sources
    ]


def check_epochs(
    data: DataConfig, sources: Sequence[Sequence[TokenisedDocument]], read: int
) -> None:
    """Raises ValueError where a run would read the embedded documents too often.

    `read` is the number of tokens of all steps.
    """
    weights = dict(data.mixture or ((data.source, 1.0),))
    for name, documents in zip(data.sources, sources, strict=True):
        held = sum(len(document.tokens) for document in documents)
        epochs = math.ceil(read * weights[name] / sum(weights.values()) / held)
        if name == "embedded" and epochs > data.sample_epochs:
            raise ValueError(
                f"data.source='embedded' is a sample of {held:,} tokens, which this "
                f"run would read {epochs:,} times: name documents ({PAPER_DATA}), or "
                f"allow it with --data.sample-epochs {epochs}"
            )


def batches(
    config: Settings,
    sources: Sequence[Sequence[TokenisedDocument]],
    part: tuple[int, int] = (0, 1),
) -> BatchIterator:
    """This host's part of the run's batches.

    Args:
        config: of the run.
        sources: the documents of each source, from `load_sources`.
        part: index and number of the parts of a batch, by host: see `host_part`.
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
    """Minimum tokens of a document in a mode: one more than its inputs."""
    return context_length + 1 if mode == "chunked" else 2


def validation(
    config: Settings, tokenizer: Tokenizer, model: Model
) -> Callable[[TrainState, Callable[[], bool]], dict[str, float]]:
    """Perplexity of the scored targets in a few texts of each validation document.

    Only the structure of `model` is used.
    """
    length = config.data.context_length
    documents = load_split(config, tokenizer, "validation")
    # From every document, so that long ones do not dominate.
    share = -(-config.data.validation_texts // len(documents))
    documents = [
        # One more token for the last target.
        d._replace(tokens=np.asarray(d.tokens[: share * length + 1]))
        for d in documents
    ]
    # Only the structure: the model would be a second copy of the parameters.
    graph, window = nnx.graphdef(model), model.window

    def evaluate(state, should_stop):
        trained = model_of(graph, state)
        quiet = jax.process_index() != 0
        with Status("evaluating", "tokens", quiet=quiet) as status:
            losses = evaluation.token_losses(
                trained,
                documents,
                context_length=length,
                tokens_per_call=length,
                batch_size=min(config.data.batch_size, config.data.validation_texts),
                should_stop=should_stop,
                progress=status,
            )
        # A model that reads ahead has seen some of the targets.
        losses = evaluation.drop_leaked_targets(trained, losses)
        found = {"validation_perplexity": evaluation.perplexity(losses)}
        if losses.mask[:, window:].any():
            beyond = evaluation.perplexity(losses, first=window)
            found["validation_perplexity_beyond_window"] = beyond
        return found

    return evaluate
