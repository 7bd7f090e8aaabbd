"""What is trained: three small models that differ in one layer or in their windows."""

import dataclasses
from pathlib import Path

import jax

from experiments.lab.measure import tree_bytes
from memjax.checks import check_positive, check_sizes
from memjax.models import LanguageModel, ModelConfig
from memjax.models.language_model.presets import TINY
from memjax.training import LoopConfig, OptimizerConfig
from memjax.training import pretrain as run

#: What is trained, for each seed.
FAMILIES = ("window", "wide", "elastic")
MEMORY = "Elastic Memory"


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that changes the result.

    Attributes:
        minutes: budget for the whole program on this machine; sets the steps.
        steps: steps of each model; 0 is what the budget allows.
        source: documents, as `memjax train` takes them.
        seeds: of every model, from `seed` on.
        window: tokens that attention sees, and block of the memory.
        context_length: tokens of a text.
        batch_size: texts in an update.
        test_texts: held-out texts of each document that are scored.
        sample_tokens: length of the sample.
        learning_rate: peak.
        seed: of parameters, data order and sample.
        run_dir: where runs, results and plots go.
    """

    minutes: float = 8.0
    steps: int = 0
    source: str = "embedded"
    seeds: int = 1
    window: int = 8
    context_length: int = 1024
    batch_size: int = 1
    test_texts: int = 32
    sample_tokens: int = 120
    learning_rate: float = 3e-3
    seed: int = 42
    run_dir: Path = Path("runs/books")

    def __post_init__(self):
        check_positive(minutes=self.minutes)
        check_sizes(test_texts=self.test_texts, seeds=self.seeds)
        if self.context_length <= self.window:
            raise ValueError(
                f"context_length={self.context_length} must be above "
                f"window={self.window}: there is nothing beyond it to remember"
            )


def model_config(family: str, window: int) -> ModelConfig:
    """A model of three layers; the memory is in the middle one."""
    middle = "elastic_memory" if family == "elastic" else "sliding_window"
    read = dict(order=64, memory_tokens=32, sampling="exponential", decay=0.8)
    size = dataclasses.replace(
        TINY, num_layers=3, window=window, options={"elastic_memory": read}
    )
    return size.model("sliding_window", middle, "sliding_window", vocab_size=4096)


def wide_window(window: int) -> int:
    """Tokens of the shortest windows that keep no fewer bytes than the memory."""
    memory = state_bytes(model_config("elastic", window))
    wide = window
    while state_bytes(model_config("wide", wide)) < memory:
        wide += 1
    return wide


def state_bytes(config: ModelConfig) -> int:
    """What a model keeps of one text between two tokens."""
    shapes = lambda: LanguageModel(config, key=jax.random.key(0)).init_state(1)
    state = jax.eval_shape(shapes)
    return tree_bytes(state)


def window_of(config: Config, family: str) -> int:
    """Tokens that the attention of a model sees."""
    return wide_window(config.window) if family == "wide" else config.window


def name_of(config: Config, family: str) -> str:
    """As tables and plots have it."""
    if family == "elastic":
        return MEMORY
    return f"windows of {window_of(config, family)}"


def run_config(config: Config, family: str, steps: int, seed: int) -> run.RunConfig:
    """The run of one model."""
    return run.RunConfig(
        model=model_config(family, window_of(config, family)),
        data=run.DataConfig(
            source=config.source,
            context_length=config.context_length,
            batch_size=config.batch_size,
        ),
        optimizer=OptimizerConfig(
            learning_rate=config.learning_rate, warmup_ratio=0.05
        ),
        loop=LoopConfig(steps=steps, save_every=200, log_every=50),
        seed=seed,
    )
