"""What a fine-tuning run is: its record, its model, and reading both back."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx
from jaxtyping import PRNGKeyArray, PyTree

from memjax.models import LanguageModel, ModelConfig
from memjax.models.hmt.model import HMT, hmt
from memjax.models.language_model.model import with_config
from memjax.models.language_model.windowed import with_window
from memjax.models.lora import add_lora
from memjax.models.mplus.model import MPlus, mplus
from memjax.training import pretrain as run
from memjax.training.finetune.config import FinetuneConfig
from memjax.training.finetune.mplus_config import MPlusStage
from memjax.training.mplus.step import init_task_state
from memjax.training.optimizer import optimizer, with_rates
from memjax.training.pretrain import DataConfig
from memjax.training.run_folder import CONFIG_FILE, newest_state, read_config
from memjax.training.step import TrainState, init_train_state, model_of

SECOND_STAGE = "stage2"
LATER_STAGES = ("stage3", SECOND_STAGE)
TOKENIZER_FILE = "tokenizer.json"
Model = HMT | MPlus | LanguageModel


@dataclasses.dataclass(frozen=True)
class FinetuneRun:
    """What a run's folder says about it.

    Attributes:
        config: of the stage.
        model: of the backbone, as it came.
        tokenizer: "bytes", "bpe4k", or the folder's own "tokenizer.json", which `load`
            replaces by its path.
        tokenizer_digest: two tokenizers with one digest encode alike.
        backbone_digest: of the parameters of the backbone as it came.
        start_digest: of the parameters that the stage before ended with; empty without
            one.
    """

    config: FinetuneConfig | MPlusStage
    model: ModelConfig
    tokenizer: str
    tokenizer_digest: str
    backbone_digest: str
    start_digest: str = ""

    @property
    def data(self) -> DataConfig:
        """Documents and samples, as of a training run."""
        return DataConfig(
            **vars(self.config.data),
            tokenizer=self.tokenizer,
            context_length=self.config.context_length,
        )

    @property
    def seed(self) -> int:
        """Of the data order."""
        return self.config.seed


def later_stage(run_dir: Path) -> Path | None:
    """The folder of the last stage but the first that lies in a folder, if any does."""
    folders = (run_dir / name for name in LATER_STAGES)
    return next((folder for folder in folders if folder.is_dir()), None)


def load(run_dir: Path) -> tuple[FinetuneRun, Model]:
    """A fine-tuning run and its newest good checkpoint's model.

    Where several stages lie in the folder, the last. Adapters are still apart:
    `merge_lora` joins them.

    Raises:
        ValueError: if the folder is no such run, or its checkpoint is unreadable.
    """
    run_dir = later_stage(run_dir) or run_dir
    described: FinetuneRun = read_config(FinetuneRun, run_dir)
    if described.tokenizer == TOKENIZER_FILE:
        here = str(run_dir / TOKENIZER_FILE)
        described = dataclasses.replace(described, tokenizer=here)
    model = structure(described)
    create = functools.partial(first_state, described)
    shapes = jax.eval_shape(create, nnx.state(model), jax.random.key(0))
    state = newest_state(run_dir, shapes)
    return described, model_of(nnx.graphdef(model), state)


def load_model(run_dir: Path) -> tuple[run.RunConfig | FinetuneRun, Model]:
    """The newest model of any run, trained from scratch or fine-tuned.

    Raises:
        ValueError: as `load` and `run.load_model`.
    """
    file = run_dir / CONFIG_FILE
    finetuned = file.is_file() and '"backbone_digest"' in file.read_text()
    if finetuned or later_stage(run_dir):
        return load(run_dir)
    return run.load_model(run_dir)


def structure(described: FinetuneRun) -> Model:
    """The run's model with shapes for parameters."""
    key = jax.random.key(0)
    return nnx.eval_shape(
        lambda: wrap(described.config, LanguageModel(described.model, key=key), key)
    )


def transform_of(config: FinetuneConfig | MPlusStage) -> optax.GradientTransformation:
    """How a stage's parameters follow their gradients."""
    transform = optimizer(config.optimizer, config.loop.steps)
    if isinstance(config, MPlusStage):
        return with_rates(transform, config.rates)
    return transform


def first_state(
    described: FinetuneRun, variables: PyTree, key: PRNGKeyArray
) -> TrainState:
    """The state that a run starts from, of its model's variables.

    `key` is of the random numbers of a memory that training carries.
    """
    config = described.config
    model: Any = nnx.merge(nnx.graphdef(structure(described)), variables)
    transform = transform_of(config)
    rows = config.data.batch_size
    if isinstance(config, MPlusStage):
        return init_task_state(model, transform, rows, config.tasks.target, key)
    return init_train_state(model, transform, config.step, rows)


def wrap(
    config: FinetuneConfig | MPlusStage, backbone: LanguageModel, key: PRNGKeyArray
) -> Model:
    """The model that a stage trains, made from a plain backbone."""
    lora_key, memory_key = jax.random.split(key)
    if config.dtype is not None:
        backbone = with_config(backbone, dtype=config.dtype)
    if isinstance(config, MPlusStage):
        return mplus(backbone, config.memory, key=memory_key)
    if config.memory == "window":
        backbone = _limited(backbone, config.window)
    if config.train == "lora":
        backbone = add_lora(backbone, config.lora, lora_key)
    if config.memory == "window":
        return backbone
    return hmt(backbone, config.hmt, key=memory_key)


def next_stage(described: FinetuneRun, trained: Any, key: PRNGKeyArray) -> Model:
    """The model of a stage that starts from what the one before trained.

    HMT: a new memory on its backbone and with its first memory. M+: all that it
    learned; a retriever that it had not is new, and the memory empty.
    """
    config = described.config
    if isinstance(config, MPlusStage):
        model = wrap(config, trained.backbone, key)
        for name in nnx.state(trained, nnx.Param):
            if hasattr(model, name):
                setattr(model, name, nnx.data(getattr(trained, name)))
        return model
    _, memory_key = jax.random.split(key)
    # The backbone as it came: stage 1's has caches of its segments' length.
    backbone = with_config(
        trained.backbone,
        mixers=described.model.mixers,
        capacity=described.model.capacity,
        remat=described.model.remat,
        dtype=config.dtype or described.model.dtype,
    )
    model = hmt(backbone, config.hmt, key=memory_key)
    model.initial_memory = trained.initial_memory
    return model


def _limited(backbone: LanguageModel, window: int) -> LanguageModel:
    """Attention in windows; in a backbone without attention they are a unit only."""
    attending = {"attention", "sliding_window", "elastic_memory"}
    if attending & set(backbone.config.mixers):
        return with_window(backbone, window)
    return with_config(backbone, window=window)
