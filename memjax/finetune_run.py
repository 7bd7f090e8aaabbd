"""What a fine-tuning run is: its record, its model, and reading both back."""

import dataclasses
import functools
from pathlib import Path

import jax
from flax import nnx
from jaxtyping import PRNGKeyArray, PyTree

from memjax import run
from memjax.finetune_config import FinetuneConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.hmt import HMT, hmt
from memjax.models.language_model import with_config
from memjax.models.lora import add_lora
from memjax.models.windowed import with_window
from memjax.run import DataConfig
from memjax.run_folder import CONFIG_FILE, newest_state, read_config
from memjax.training.optimizer import optimizer
from memjax.training.step import TrainState, init_train_state, model_of

SECOND_STAGE = "stage2"
TOKENIZER_FILE = "tokenizer.json"


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
        start_digest: of the parameters that stage 1 ended with; empty without one.
    """

    config: FinetuneConfig
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


def load(run_dir: Path) -> tuple[FinetuneRun, HMT | LanguageModel]:
    """A fine-tuning run and its newest good checkpoint's model.

    Where both stages lie in the folder, the second. Adapters are still apart:
    `merge_lora` joins them.

    Raises:
        ValueError: if the folder is no such run, or its checkpoint is unreadable.
    """
    if (run_dir / SECOND_STAGE).is_dir():
        run_dir = run_dir / SECOND_STAGE
    described: FinetuneRun = read_config(FinetuneRun, run_dir)
    if described.tokenizer == TOKENIZER_FILE:
        here = str(run_dir / TOKENIZER_FILE)
        described = dataclasses.replace(described, tokenizer=here)
    model = structure(described)
    create = functools.partial(first_state, described)
    state = newest_state(run_dir, jax.eval_shape(create, nnx.state(model)))
    return described, model_of(nnx.graphdef(model), state)


def load_model(
    run_dir: Path,
) -> tuple[run.RunConfig | FinetuneRun, HMT | LanguageModel]:
    """The newest model of any run, trained from scratch or fine-tuned.

    Raises:
        ValueError: as `load` and `run.load_model`.
    """
    file = run_dir / CONFIG_FILE
    finetuned = file.is_file() and '"backbone_digest"' in file.read_text()
    if finetuned or (run_dir / SECOND_STAGE).is_dir():
        return load(run_dir)
    return run.load_model(run_dir)


def structure(described: FinetuneRun) -> HMT | LanguageModel:
    """The run's model with shapes for parameters."""
    key = jax.random.key(0)
    return nnx.eval_shape(
        lambda: wrap(described.config, LanguageModel(described.model, key=key), key)
    )


def first_state(described: FinetuneRun, variables: PyTree) -> TrainState:
    """The state that a run starts from, of its model's variables."""
    config = described.config
    return init_train_state(
        nnx.merge(nnx.graphdef(structure(described)), variables),
        optimizer(config.optimizer, config.loop.steps),
        config.step,
        config.data.batch_size,
    )


def wrap(
    config: FinetuneConfig, backbone: LanguageModel, key: PRNGKeyArray
) -> HMT | LanguageModel:
    """The model that a stage trains, made from a plain backbone."""
    lora_key, memory_key = jax.random.split(key)
    if config.dtype is not None:
        backbone = with_config(backbone, dtype=config.dtype)
    if config.memory == "window":
        backbone = _limited(backbone, config.window)
    if config.train == "lora":
        backbone = add_lora(backbone, config.lora, lora_key)
    if config.memory == "window":
        return backbone
    return hmt(backbone, config.hmt, key=memory_key)


def second_stage(described: FinetuneRun, trained: HMT, key: PRNGKeyArray) -> HMT:
    """A new memory on the backbone and with the first memory of stage 1."""
    _, memory_key = jax.random.split(key)
    # The backbone as it came: stage 1's has caches of its segments' length.
    backbone = with_config(
        trained.backbone,
        mixers=described.model.mixers,
        capacity=described.model.capacity,
        remat=described.model.remat,
        dtype=described.config.dtype or described.model.dtype,
    )
    model = hmt(backbone, described.config.hmt, key=memory_key)
    model.initial_memory = trained.initial_memory
    return model


def _limited(backbone: LanguageModel, window: int) -> LanguageModel:
    """Attention in windows; in a backbone without attention they are a unit only."""
    attending = {"attention", "sliding_window", "elastic_memory"}
    if attending & set(backbone.config.mixers):
        return with_window(backbone, window)
    return with_config(backbone, window=window)
