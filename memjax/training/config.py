"""Configuration and presets of training runs, and the outcome of a run."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, Protocol, get_args, runtime_checkable

import jax
import optax
from jaxtyping import PRNGKeyArray

from memjax.checks import (
    check_numbers,
    check_sizes,
    require_all,
    require_instance,
    require_known,
)
from memjax.config_io import AnyPath
from memjax.data import TokenisedDocument, Tokenizer, load_tokenizer
from memjax.leaving import EXIT_PREEMPTED
from memjax.models import LanguageModel, ModelConfig, preset
from memjax.models.checkpoints.text_interface import TextInterface
from memjax.models.language_model.inputs import start_multiple
from memjax.models.language_model.presets import FAMILIES, TINY, TRELLIS_SIZES
from memjax.training.distributed.sharding import MeshConfig
from memjax.training.monitoring.model_flops import flops_per_token
from memjax.training.optimizer import OptimizerConfig, make_optimizer
from memjax.training.run_data import DataConfig as DataConfig
from memjax.training.run_data import batches, shortest
from memjax.training.step import (
    Compile,
    StepConfig,
    TrainState,
    abstract_model,
    check_run,
    init_train_state,
    make_train_step,
)

#: Commands that train.
Kind = Literal["train", "finetune"]
Reason = Literal["finished", "out of time", "preempted"]
WriterName = Literal["tensorboard", "wandb", "mlflow"]


@runtime_checkable
class DataIterator(Protocol):
    """Endless batches with a position that is JSON.

    With several processes the position must be the same on each of them.
    """

    def __next__(self) -> Any: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any, /) -> Any: ...


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """Length of a run, checkpoints, evaluation and logs; steps are counted from 1.

    Attributes:
        steps: the step to train to, >= 1; raising it later extends a run.
        save_every: steps between checkpoints, >= 1. A kill can cost two such intervals:
            a checkpoint is written while training goes on, and counts once it is whole.
            None is begun while steps are skipped in a row.
        evaluate_every: steps between evaluations, and one after the last step;
            0 for none.
        log_every: steps between lines of `metrics.jsonl`, >= 1.
        keep: newest checkpoints that are not deleted, >= 1.
        max_nan_steps: skipped steps in a row that stop the run, >= 1.
        profile: first and last step of a profiler trace in `<run>/profile`.
        minutes: stop cleanly this long after `train` was called, > 0.
        writers: of metrics, besides `metrics.jsonl`: any of "tensorboard", "wandb"
            (Weights & Biases) and "mlflow"; the last two are packages to install.
        sample_tokens: tokens that `memjax train` writes on a held-out text's beginning
            after the last step, to be seen; 0 for none.
        watchdog_minutes: warn of a step that waits longer than this, and than twice the
            longest wait before, for its batch or the devices; > 0.
    """

    steps: int
    save_every: int = 500
    evaluate_every: int = 0
    log_every: int = 10
    keep: int = 3
    max_nan_steps: int = 10
    profile: tuple[int, int] | None = None
    minutes: float | None = None
    writers: tuple[WriterName, ...] = ("tensorboard",)
    sample_tokens: int = 0
    watchdog_minutes: float = 5.0

    def __post_init__(self) -> None:
        for name in ("steps", "save_every", "log_every", "keep", "max_nan_steps"):
            # Steps are counted in int32.
            check_sizes(**{name: getattr(self, name)})
        counts = {n: getattr(self, n) for n in ("evaluate_every", "sample_tokens")}
        check_sizes(least=0, **counts)
        check_numbers(watchdog_minutes=self.watchdog_minutes)
        if self.minutes is not None:
            check_numbers(minutes=self.minutes)
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes must be > 0, got {self.minutes}")
        if not self.watchdog_minutes > 0:
            raise ValueError(
                f"watchdog_minutes must be > 0, got {self.watchdog_minutes}"
            )
        require_instance("writers", self.writers, Sequence)
        for name in self.writers:
            require_known("writers", name, get_args(WriterName))
        if len(set(self.writers)) < len(self.writers):
            raise ValueError(f"writers names one twice: {self.writers}")
        if self.profile is not None:
            require_all("profile", self.profile, int)
            if len(self.profile) != 2 or not 1 <= self.profile[0] <= self.profile[1]:
                raise ValueError(
                    "profile must be two steps with 1 <= first <= last, "
                    f"got {self.profile}"
                )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Why a run ended, at which step, and the number of skipped steps."""

    reason: Reason
    step: int
    skipped_steps: int

    @property
    def exit_code(self) -> int:
        """Exit code of the program: 75 if it should be run again, else 0."""
        return EXIT_PREEMPTED if self.reason == "preempted" else 0


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Configuration of a run; the same one resumes it bit for bit.

    Attributes:
        model: the model; its vocab_size must be the tokenizer's.
        data: documents and batches.
        optimizer: hyperparameters; the paper's Table 9.
        step: backpropagation through time, accumulation, carried memory.
        loop: steps, checkpoints, evaluation, log.
        mesh: devices.
        seed: of parameters and data order.
    """

    kind: ClassVar[Kind] = "train"

    model: ModelConfig = dataclasses.field(default_factory=lambda: _tiny("elastic"))
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    step: StepConfig = StepConfig()
    loop: LoopConfig = LoopConfig(steps=1000)
    mesh: MeshConfig = MeshConfig()
    seed: int = 42

    def __post_init__(self):
        check_run(self.data.mode, self.step, self.seed)
        if self.data.mode == "packed":
            multiple = start_multiple(self.model.mechanisms)
            if self.data.context_length % multiple:
                raise ValueError(
                    f"context_length must be a multiple of {multiple} with "
                    "mode='packed', where the mechanisms' chunks begin, got "
                    f"{self.data.context_length}"
                )

    @property
    def language_model(self) -> ModelConfig:
        """The model."""
        return self.model

    @property
    def origin(self) -> str:
        """Empty: parameters began at random."""
        return ""

    @property
    def memory_name(self) -> str:
        """For messages."""
        return "from random parameters"

    @property
    def tokens_read(self) -> int:
        """Tokens of a sample."""
        return self.data.context_length

    @property
    def shortest_document(self) -> int:
        """Tokens of the shortest document that is read."""
        return shortest(self.data.mode, self.data.context_length)

    def anonymous(self) -> "RunConfig":
        """The same compiled programs, without seed, texts and reports."""
        data = self.data
        return dataclasses.replace(
            self,
            data=DataConfig(
                mode=data.mode,
                context_length=data.context_length,
                batch_size=data.batch_size,
            ),
            loop=LoopConfig(steps=self.loop.steps),
            seed=0,
        )

    def structure(self) -> LanguageModel:
        """The model with shapes for parameters."""
        return abstract_model(self.model)

    def text(self, folder: AnyPath) -> TextInterface:
        """The tokenizer; it has no chat template."""
        return TextInterface(load_tokenizer(self.data.tokenizer))

    def batches(
        self,
        sources: Sequence[Sequence[TokenisedDocument]],
        tokenizer: Tokenizer,
        part: tuple[int, int] = (0, 1),
    ) -> DataIterator:
        """The batches of all steps, or a host's part of each."""
        return batches(self, sources, part)

    def create_state(self, key: PRNGKeyArray) -> TrainState:
        """The state before the first step."""
        model = LanguageModel(self.model, key=key)
        return init_train_state(
            model, self._transform(), self.step, self.data.batch_size
        )

    def state_shapes(self) -> TrainState:
        """The state with shapes for arrays."""
        return jax.eval_shape(self.create_state, jax.random.key(0))

    def make_step(self, compiled: Compile) -> Callable:
        """The update, compiled."""
        return compiled(make_train_step(self.structure(), self._transform(), self.step))

    def flops_per_step(self, state: TrainState) -> float:
        """Operations of a step over all devices."""
        length = self.data.context_length
        tokens = self.data.batch_size * length
        return flops_per_token(self.structure(), length) * tokens

    def _transform(self) -> optax.GradientTransformation:
        return make_optimizer(self.optimizer, self.loop.steps)


# Peak learning rate and tokens of each size: Trellis, Table 5.
TRELLIS_TRAINING = {
    "125m": (3e-3, 2.4e9),
    "170m": (3e-3, 15e9),
    "350m": (1.5e-3, 15e9),
    "780m": (1.25e-3, 30e9),
}


# Of the embedded tokenizer.
VOCABULARY = 4096


def presets() -> dict[str, RunConfig]:
    """Runs by name: a quick one, tiny ones for a laptop, and those of the papers.

    Tokenizer and documents are the embedded ones, where the papers have a vocabulary of
    32,000: set `data.tokenizer`, and `with_vocabulary` takes its size.
    """
    models = {
        (name, size): preset(f"{name}-{size}", VOCABULARY)
        for name, family in FAMILIES.items()
        for size in family.sizes
    }
    # The tiny ones first, also in the list of the command line.
    named = sorted(models.items(), key=lambda item: item[0][1] != "tiny")
    runs = {f"{name}-{size}": _run_of(size, model) for (name, size), model in named}
    return {"quick": _quick(), **runs}


def with_vocabulary(config: RunConfig, tokenizer: Tokenizer) -> RunConfig:
    """The vocabulary size of the tokenizer, unless `model.vocab_size` was set."""
    if config.model.vocab_size != VOCABULARY:
        return config
    model = dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size)
    return dataclasses.replace(config, model=model)


def _quick() -> RunConfig:
    """Two minutes on two CPU cores."""
    size = dataclasses.replace(TINY, num_layers=2)
    return RunConfig(
        model=size.model("sliding_window", "elastic_memory", vocab_size=VOCABULARY),
        data=DataConfig(context_length=256, batch_size=4),
        optimizer=OptimizerConfig(learning_rate=5e-3),
        loop=LoopConfig(steps=600, evaluate_every=200, sample_tokens=60),
    )


def _run_of(size: str, model: ModelConfig) -> RunConfig:
    """Training as in the paper of a size, with 2**19 tokens per update."""
    if size == "tiny":
        return RunConfig(model=model)
    if size in TRELLIS_SIZES:
        rate, tokens = TRELLIS_TRAINING[size]
        return RunConfig(
            model=model,
            data=DataConfig(context_length=2048, batch_size=256),
            optimizer=OptimizerConfig(learning_rate=rate),
            loop=_long_loop(round(tokens / 2**19)),
        )
    return RunConfig(
        model=model,
        data=DataConfig(context_length=32_768, batch_size=16),
        loop=_long_loop(80_000),
    )


def _long_loop(steps: int) -> LoopConfig:
    return LoopConfig(steps=steps, save_every=1000, evaluate_every=1000)


def _tiny(family: str) -> ModelConfig:
    return preset(f"{family}-tiny", VOCABULARY)
