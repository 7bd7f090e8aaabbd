"""Settings of a training run, presets of them, and how a run ended."""

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from memjax.checks import check_sizes, require_known
from memjax.data import Tokenizer
from memjax.models import ModelConfig, preset
from memjax.models.language_model.inputs import start_multiple
from memjax.models.language_model.presets import FAMILIES, TRELLIS_SIZES
from memjax.training.distributed.sharding import MeshConfig
from memjax.training.optimizer import OptimizerConfig
from memjax.training.step import StepConfig, check_run

#: Exit code of a run that a signal stopped after its state was saved: the
#: `EX_TEMPFAIL` of sysexits.h. Running the same command again continues it.
EXIT_PREEMPTED = 75

Mode = Literal["chunked", "packed", "streamed"]
Reason = Literal["finished", "out of time", "preempted"]
WriterName = Literal["tensorboard", "wandb", "mlflow"]


@runtime_checkable
class DataIterator(Protocol):
    """Batches without end, with a position that JSON can hold.

    With several processes the position must be the same on each of them.
    """

    def __next__(self) -> Any: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any, /) -> Any: ...


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """How long to train and what to do meanwhile; steps are counted from 1.

    Attributes:
        steps: the step to train to, >= 1; raising it later extends a run.
        save_every: steps between checkpoints, >= 1. A kill can cost two such intervals:
            a checkpoint is written while training goes on, and counts once it is whole.
            None is begun while steps are skipped in a row.
        evaluate_every: steps between evaluations, and one after the last step;
            0 for none.
        log_every: steps between lines of `metrics.jsonl`, >= 1.
        keep: checkpoints kept, >= 1.
        max_nan_steps: skipped steps in a row that stop the run, >= 1.
        profile: first and last step of a trace written to `<run>/profile`.
        minutes: stop cleanly this long after `train` was called, > 0.
        writers: where metrics go beside `metrics.jsonl`, any of "tensorboard", "wandb"
            (Weights & Biases) and "mlflow"; the last two are packages to install.
        watchdog_minutes: a step that waits longer than this for its batch or the
            devices, and twice as long as any before, is named once, with its host; > 0.
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
    watchdog_minutes: float = 5.0

    def __post_init__(self) -> None:
        for name in ("steps", "save_every", "log_every", "keep", "max_nan_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
            # Steps are counted in int32.
            check_sizes(**{name: getattr(self, name)})
        if self.evaluate_every < 0:
            raise ValueError(f"evaluate_every must be >= 0, got {self.evaluate_every}")
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes must be > 0, got {self.minutes}")
        if not self.watchdog_minutes > 0:
            raise ValueError(
                f"watchdog_minutes must be > 0, got {self.watchdog_minutes}"
            )
        for name in self.writers:
            require_known("writers", name, get_args(WriterName))
        if len(set(self.writers)) < len(self.writers):
            raise ValueError(f"writers names one twice: {self.writers}")
        if self.profile is not None and not 1 <= self.profile[0] <= self.profile[1]:
            raise ValueError(
                f"profile must be two steps with 1 <= first <= last, got {self.profile}"
            )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended, the step it stands at, and the steps skipped in all."""

    reason: Reason
    step: int
    skipped_steps: int

    @property
    def exit_code(self) -> int:
        """What the program should exit with: 75 if it should be run again, else 0."""
        return EXIT_PREEMPTED if self.reason == "preempted" else 0


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


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything that shapes a run; running the same again resumes it bit for bit.

    Attributes:
        model: the model; its vocab_size must be the tokenizer's.
        data: documents and batches.
        optimizer: hyperparameters; the paper's Table 9.
        step: backpropagation through time, accumulation, carried memory.
        loop: steps, checkpoints, evaluation, log.
        mesh: devices.
        seed: of parameters and data order.
    """

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


# Peak learning rate and tokens of each size: Trellis, Table 5.
TRELLIS_TRAINING = {
    "125m": (3e-3, 2.4e9),
    "170m": (3e-3, 15e9),
    "350m": (1.5e-3, 15e9),
    "780m": (1.25e-3, 30e9),
}


# Of the tokenizer that ships: a fresh installation has no other.
VOCABULARY = 4096


def presets() -> dict[str, RunConfig]:
    """Runs by name: the tiny ones for a laptop, the others as the papers train them.

    The tokenizer and the documents are those that ship. The papers have others, of
    32,000 ids: `data.tokenizer` names one, and `with_vocabulary` takes its size.
    """
    models = {
        (name, size): preset(f"{name}-{size}", VOCABULARY)
        for name, family in FAMILIES.items()
        for size in family.sizes
    }
    # The tiny ones first: this is the order in which `presets` lists them.
    named = sorted(models.items(), key=lambda item: item[0][1] != "tiny")
    return {f"{name}-{size}": _run_of(size, model) for (name, size), model in named}


def with_vocabulary(config: RunConfig, tokenizer: Tokenizer) -> RunConfig:
    """A preset with the vocabulary of another tokenizer, where only that was changed.

    A `model.vocab_size` that is not the presets' stays as it was given.
    """
    if config.model.vocab_size != VOCABULARY:
        return config
    model = dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size)
    return dataclasses.replace(config, model=model)


def _run_of(size: str, model: ModelConfig) -> RunConfig:
    """How the paper of a size trains, with 2**19 tokens an update."""
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
