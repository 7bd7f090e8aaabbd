"""Record of a fine-tuning run, and loading of its model."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
from flax import nnx
from jaxtyping import PRNGKeyArray, PyTree

from memjax.config_io import AnyPath
from memjax.data import TokenisedDocument, Tokenizer, load_tokenizer
from memjax.models import LanguageModel, ModelConfig
from memjax.models.checkpoints.text_interface import TextInterface, read_text_interface
from memjax.training import pretrain
from memjax.training.checkpoints.folder import check_path
from memjax.training.config import DataIterator, Kind, LoopConfig, RunConfig
from memjax.training.distributed.sharding import MeshConfig
from memjax.training.finetune.mplus_stage import MPlusStage
from memjax.training.finetune.retrofit_stage import RetrofitStage
from memjax.training.finetune.segment_stage import SegmentStage
from memjax.training.finetune.stage import Model
from memjax.training.monitoring.model_flops import flops_per_tuned_token
from memjax.training.optimizer import OptimizerConfig
from memjax.training.run_data import DataConfig
from memjax.training.run_folder import CONFIG_FILE, newest_state, read_config
from memjax.training.step import Compile, TrainState, abstract_model, model_of

LATER_STAGES = ("refit", "stage3", "stage2")
TOKENIZER_FILE = "tokenizer.json"
#: Tokenizers that are part of the library.
SHIPPED = ("bytes", "bpe4k")
#: Kinds of stages; the fields of a record tell which.
AnyStage = SegmentStage | MPlusStage | RetrofitStage


@dataclasses.dataclass(frozen=True)
class FinetuneRun:
    """Record of a fine-tuning run.

    Attributes:
        config: of the stage.
        model: of the pretrained backbone.
        tokenizer: "bytes", "bpe4k", or the folder's own "tokenizer.json", which
            `read_run` replaces by its path.
        tokenizer_digest: of the tokenizer's encoding.
        backbone_digest: of the pretrained backbone's parameters.
        start_digest: of the previous stage's parameters; empty without one.
        origin: the pretrained model, a path or "owner/name@commit" of the hub; empty in
            early runs.
    """

    kind: ClassVar[Kind] = "finetune"

    config: AnyStage
    model: ModelConfig
    tokenizer: str
    tokenizer_digest: str
    backbone_digest: str
    start_digest: str = ""
    origin: str = ""

    @property
    def data(self) -> DataConfig:
        """Documents and samples, as of a training run."""
        return DataConfig(
            **vars(self.config.data),
            tokenizer=self.tokenizer,
            context_length=self.config.context_length,
        )

    @property
    def optimizer(self) -> OptimizerConfig:
        """Of the stage."""
        return self.config.optimizer

    @property
    def loop(self) -> LoopConfig:
        """Of the stage."""
        return self.config.loop

    @property
    def mesh(self) -> MeshConfig:
        """Of the stage."""
        return self.config.mesh

    @property
    def seed(self) -> int:
        """Of the data order."""
        return self.config.seed

    @property
    def memory_name(self) -> str:
        """The model's memory, for messages."""
        return self.config.memory_name

    @property
    def tokens_read(self) -> int:
        """Tokens of a sample that a step reads."""
        return self.config.tokens_read

    @property
    def shortest_document(self) -> int:
        """Tokens of the shortest document that is read."""
        return self.config.shortest_document

    def structure(self) -> Model:
        """The run's model with shapes for parameters."""
        return nnx.merge(*_structure(self.config, self.model))

    @property
    def language_model(self) -> ModelConfig:
        """Configuration of the trained model, or of the backbone inside."""
        model = self.structure()
        return model.backbone.config if model.backbone is model else self.model

    def anonymous(self) -> "FinetuneRun":
        """The same compiled programs, without seed, digests and origin."""
        stage = dataclasses.replace(self.config, seed=0)
        return dataclasses.replace(
            self, config=stage, backbone_digest="", start_digest="", origin=""
        )

    def text(self, folder: AnyPath) -> TextInterface:
        """Tokenizer and chat template, from the folder of the run or its last stage."""
        if self.tokenizer in SHIPPED:
            return TextInterface(load_tokenizer(self.tokenizer))
        return read_text_interface(folder, self.model.vocab_size)

    def batches(
        self,
        sources: Sequence[Sequence[TokenisedDocument]],
        tokenizer: Tokenizer,
        part: tuple[int, int] = (0, 1),
    ) -> DataIterator:
        """The batches of all steps, or a host's part of each."""
        documents = [document for source in sources for document in source]
        index, count = part
        return self.config.batches(
            documents,
            tokenizer,
            self.model.vocab_size,
            shard_index=index,
            shard_count=count,
        )

    def create_state(self, variables: PyTree, key: PRNGKeyArray) -> TrainState:
        """The state before the first step, of the model's variables.

        `key` is of the random numbers of a memory that training carries.
        """
        # Made from shapes, so that the state can be created inside jit.
        model = nnx.merge(nnx.graphdef(self.structure()), variables)
        return self.config.first_state(model, key)

    def state_shapes(self) -> TrainState:
        """The state with shapes for arrays."""
        return _state_shapes(self.anonymous())

    def make_step(self, compiled: Compile) -> Callable:
        """The update; `compiled` makes programs of its pure parts."""
        return self.config.make_step(self.structure(), self.model, compiled)

    def flops_per_step(self, state: TrainState) -> float:
        """Operations of a step over all devices."""
        backbone = abstract_model(self.model)
        each = flops_per_tuned_token(backbone, state.params, state.frozen)
        return self.data.batch_size * self.tokens_read * each


# Traced once for all its uses.
@functools.lru_cache(maxsize=8)
def _structure(stage: AnyStage, model: ModelConfig) -> tuple[Any, Any]:
    key = jax.random.key(0)

    def wrapped():
        return stage.wrap(LanguageModel(model, key=key), key)

    return nnx.split(nnx.eval_shape(wrapped))


def later_stage(run_dir: AnyPath) -> AnyPath | None:
    """Folder of the last stage after the first in a run's folder, if any."""
    folders = (run_dir / name for name in LATER_STAGES)
    return next((folder for folder in folders if folder.is_dir()), None)


def is_finetuned(run_dir: AnyPath) -> bool:
    """Whether a folder is of a fine-tuning run, rather than one from scratch."""
    file = run_dir / CONFIG_FILE
    # A field that only fine-tuning has.
    finetuned = file.is_file() and '"backbone_digest"' in file.read_text()
    return finetuned or later_stage(run_dir) is not None


def read_run(run_dir: AnyPath) -> FinetuneRun:
    """The record of a run; of several stages, of the last.

    Raises:
        ValueError: if the folder is no such run.
    """
    run_dir = check_path("run_dir", run_dir)
    run_dir = later_stage(run_dir) or run_dir
    described: FinetuneRun = read_config(FinetuneRun, run_dir)
    if described.tokenizer != TOKENIZER_FILE:
        return described
    here = str(run_dir / TOKENIZER_FILE)
    return dataclasses.replace(described, tokenizer=here)


def load(run_dir: AnyPath) -> tuple[FinetuneRun, Model]:
    """Record of a fine-tuning run, and the model of its newest undamaged checkpoint.

    Of several stages, the last. `merge_lora` merges the adapters.

    Raises:
        ValueError: if the folder is no such run, or its checkpoint is unreadable.
    """
    run_dir = check_path("run_dir", run_dir)
    described = read_run(run_dir)
    state = newest_state(later_stage(run_dir) or run_dir, described.state_shapes())
    return described, model_of(nnx.graphdef(described.structure()), state)


@functools.lru_cache(maxsize=8)
def _state_shapes(described: FinetuneRun) -> TrainState:
    variables, key = nnx.state(described.structure()), jax.random.key(0)
    return jax.eval_shape(described.create_state, variables, key)


def load_model(run_dir: AnyPath) -> tuple[RunConfig | FinetuneRun, Model]:
    """The newest model of any run, trained from scratch or fine-tuned.

    Raises:
        ValueError: as `load` and `pretrain.load_model`.
    """
    run_dir = check_path("run_dir", run_dir)
    return load(run_dir) if is_finetuned(run_dir) else pretrain.load_model(run_dir)
