"""The interface of a stage of fine-tuning: its model, data and update.

Kinds: `SegmentStage` (HMT, RMT, a window, tokens read again), `RetrofitStage` (hybrid
layers) and `MPlusStage`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import optax
from jaxtyping import PRNGKeyArray

from memjax.checks import check_sizes, require_known
from memjax.data import RowConfig, TokenisedDocument, Tokenizer
from memjax.models import LanguageModel, ModelConfig
from memjax.models.hmt.model import HMT
from memjax.models.language_model.reread import ReReadWindow
from memjax.models.mplus.model import MPlus
from memjax.training.config import DataIterator, LoopConfig
from memjax.training.distributed.sharding import MeshConfig
from memjax.training.optimizer import OptimizerConfig, make_optimizer, with_rates
from memjax.training.run_data import make_batches, shortest
from memjax.training.step import (
    Compile,
    Step,
    StepConfig,
    TrainState,
    init_train_state,
    make_train_step,
)

Model = HMT | MPlus | ReReadWindow | LanguageModel
#: `memory_name` of a stage with a plain backbone.
NO_MEMORY = "no memory"


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """Source of a stage's samples.

    Attributes:
        source: as of `DataConfig`.
        mode: "chunked" samples are independent, as in the paper; "streamed" ones
            continue the memory of the previous sample, and need `step.carry_memory`.
        batch_size: samples of one update, over all devices.
        validation_texts: samples in each evaluation.
        cache_dir: cache of tokens; None is the user's cache folder.
        column: as of `DataConfig`.
        join: as of `DataConfig`.
        sample_epochs: as of `DataConfig`.
    """

    source: str = "embedded"
    mode: Literal["chunked", "streamed"] = "chunked"
    batch_size: int = 2
    validation_texts: int = 16
    cache_dir: Path | None = None
    column: str | None = None
    join: str | None = None
    sample_epochs: int = 100

    def __post_init__(self):
        require_known("mode", self.mode, ("chunked", "streamed"))
        check_sizes(
            batch_size=self.batch_size,
            validation_texts=self.validation_texts,
            sample_epochs=self.sample_epochs,
        )
        RowConfig(self.column, self.join)

    @property
    def rows(self) -> RowConfig:
        """How rows of the source become documents."""
        return RowConfig(self.column, self.join)


@runtime_checkable
class Stage(Protocol):
    """A frozen dataclass of settings that builds models, states and steps."""

    @property
    def data(self) -> SampleConfig: ...

    @property
    def loop(self) -> LoopConfig: ...

    @property
    def mesh(self) -> MeshConfig: ...

    @property
    def seed(self) -> int: ...

    @property
    def memory_name(self) -> str:
        """The model's memory, for messages; `NO_MEMORY` for a plain backbone."""
        ...

    @property
    def context_length(self) -> int:
        """Tokens of a text that is evaluated."""
        ...

    @property
    def tokens_read(self) -> int:
        """Tokens of a sample that a step reads."""
        ...

    @property
    def shortest_document(self) -> int:
        """Tokens of the shortest document that is read."""
        ...

    @property
    def optimizer(self) -> OptimizerConfig: ...

    @property
    def rates(self) -> Mapping[str, float]:
        """Learning rates of some parameters, relative to the rest: see `with_rates`."""
        ...

    @property
    def step(self) -> StepConfig:
        """Truncation, accumulation, loss."""
        ...

    def stages(self) -> "tuple[tuple[str, Stage], ...]":
        """This stage alone, in the run's own folder: a curriculum of one."""
        ...

    def wrap(self, backbone: LanguageModel, key: PRNGKeyArray) -> Model:
        """The model that is trained, made from a plain backbone."""
        ...

    def check_start(self, before: "Stage", start: str) -> None:
        """Raises ValueError where this stage cannot follow `before`, a run at `start`.

        `start` is how the message names that run.
        """
        ...

    def wrap_trained(
        self, trained: Model, pretrained: ModelConfig, key: PRNGKeyArray
    ) -> Model:
        """The model that is trained, from the model of the previous stage.

        Args:
            trained: that stage's model; its parameters are shared.
            pretrained: configuration of the pretrained backbone.
            key: of the parameters that are new.
        """
        ...

    def prepare(
        self,
        model: Model,
        pretrained: ModelConfig,
        before: "Stage | None",
        documents: list[TokenisedDocument],
        tokenizer: Tokenizer,
    ) -> Model:
        """The model from which a new run takes its first step.

        Args:
            model: as `wrap` or `wrap_trained` made it.
            pretrained: configuration of the pretrained backbone.
            before: the previous stage, if any.
            documents: of the training split.
            tokenizer: of the run.
        """
        ...

    def batches(
        self,
        documents: list[TokenisedDocument],
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        shard_index: int = 0,
        shard_count: int = 1,
    ) -> DataIterator:
        """The batches of all steps, from the first on; one host's part of each."""
        ...

    def transform(self) -> optax.GradientTransformation:
        """How parameters follow their gradients."""
        ...

    def first_state(self, model: Model, key: PRNGKeyArray) -> TrainState:
        """The state before the first step.

        `key` is of the random numbers of a memory that training carries.
        """
        ...

    def make_step(
        self, model: Model, pretrained: ModelConfig, compiled: Compile
    ) -> Step:
        """The update on the elements of `batches`.

        Args:
            model: gives the structure alone.
            pretrained: configuration of the pretrained backbone.
            compiled: turns a pure update `(state, batch) -> (state, metrics)` into the
                program that runs on the devices.
        """
        ...


class SampleStage:
    """Defaults of a `Stage` that updates on samples of `context_length` tokens."""

    # Fields of each stage. Were `self` a `Stage` in a property, a run-time check of the
    # annotation would ask for the property, and so without end.
    context_length: Any
    data: Any

    @property
    def tokens_read(self) -> int:
        """Tokens of a sample that a step reads."""
        return self.context_length

    @property
    def shortest_document(self) -> int:
        """Tokens of the shortest document that is read."""
        return shortest(self.data.mode, self.context_length)

    @property
    def rates(self) -> Mapping[str, float]:
        """None: all parameters have the same learning rate."""
        return {}

    def stages(self):
        """This stage alone, in the run's own folder."""
        return (("", self),)

    def prepare(
        self,
        model: Model,
        pretrained: ModelConfig,
        before: Stage | None,
        documents: list[TokenisedDocument],
        tokenizer: Tokenizer,
    ) -> Model:
        """The model as it is."""
        return model

    def batches(
        self: Stage,
        documents: list[TokenisedDocument],
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        shard_index: int = 0,
        shard_count: int = 1,
    ) -> DataIterator:
        """Samples of `context_length` tokens; a host's rows of each batch."""
        return make_batches(
            self.data.mode,
            documents,
            self.context_length,
            self.data.batch_size,
            self.seed,
            vocab_size,
            shard_index=shard_index,
            shard_count=shard_count,
        )

    def transform(self: Stage) -> optax.GradientTransformation:
        """The optimizer over all steps of the stage."""
        transform = make_optimizer(self.optimizer, self.loop.steps)
        return with_rates(transform, self.rates) if self.rates else transform

    def first_state(self: Stage, model: Model, key: PRNGKeyArray) -> TrainState:
        """The state before the first step; no random numbers are drawn."""
        rows = self.data.batch_size
        return init_train_state(model, self.transform(), self.step, rows)

    def make_step(
        self: Stage, model: Model, pretrained: ModelConfig, compiled: Compile
    ) -> Step:
        """One update of all samples of a batch."""
        return compiled(make_train_step(model, self.transform(), self.step))
