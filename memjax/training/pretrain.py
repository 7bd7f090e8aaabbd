"""A training run from one configuration, and its model read back."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import numpy as np
from flax import nnx

from memjax import evaluation
from memjax.checks import check_sizes, require_known
from memjax.config_io import completed, to_record
from memjax.data import (
    BatchIterator,
    Split,
    TokenisedDocument,
    Tokenizer,
    chunked_batches,
    load_tokenizer,
    load_tokens,
    streamed_batches,
)
from memjax.mechanisms import ElasticMemoryConfig
from memjax.models import LanguageModel, ModelConfig, preset
from memjax.models.language_model.model import with_config
from memjax.models.language_model.presets import FAMILIES, TRELLIS_SIZES
from memjax.training import loop, sharding
from memjax.training.config import LoopConfig, Outcome
from memjax.training.optimizer import OptimizerConfig, optimizer
from memjax.training.resume import FREE_FIELDS
from memjax.training.run_folder import claim, newest_state, read_config
from memjax.training.sharding import MeshConfig
from memjax.training.step import (
    StepConfig,
    TrainState,
    check_run,
    init_train_state,
    make_train_step,
    model_of,
)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is read, and in what pieces.

    Attributes:
        source: "embedded", "folder:PATH", "tfds:NAME" or "hf:NAME".
        tokenizer: "bpe4k", "bytes" or the path of a tokenizers JSON.
        mode: "chunked" cuts documents into independent texts of `context_length`, as
            the paper does; "streamed" reads whole documents, `context_length` tokens
            of each row at a time, and goes with `step.carry_memory`.
        context_length: tokens of a row in one update.
        batch_size: rows of one update, over all devices.
        validation_texts: texts of `context_length` tokens in each evaluation.
        cache_dir: where tokens are kept; None is the user's cache folder.
    """

    source: str = "embedded"
    tokenizer: str = "bpe4k"
    mode: Literal["chunked", "streamed"] = "chunked"
    context_length: int = 2048
    batch_size: int = 8
    validation_texts: int = 16
    cache_dir: Path | None = None

    def __post_init__(self):
        require_known("mode", self.mode, ("chunked", "streamed"))
        check_sizes(
            context_length=self.context_length,
            batch_size=self.batch_size,
            validation_texts=self.validation_texts,
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


@runtime_checkable
class Settings(Protocol):
    """What reading data asks of a run's configuration, of training or fine-tuning."""

    @property
    def model(self) -> ModelConfig: ...

    @property
    def data(self) -> DataConfig: ...

    @property
    def seed(self) -> int: ...


#: Beside the configuration in a checkpoint's record.
DIGEST = "tokenizer_digest"
# Peak learning rate and tokens of each size: Trellis, Table 5.
TRELLIS_TRAINING = {
    "125m": (3e-3, 2.4e9),
    "170m": (3e-3, 15e9),
    "350m": (1.5e-3, 15e9),
    "780m": (1.25e-3, 30e9),
}


def presets() -> dict[str, RunConfig]:
    """Runs by name: the tiny ones for a laptop, the others as the papers train them."""
    models = {
        (name, size): preset(f"{name}-{size}", 4096 if size == "tiny" else 32_000)
        for name, family in FAMILIES.items()
        for size in family.sizes
    }
    # The tiny ones first, as they are listed.
    named = sorted(models.items(), key=lambda item: item[0][1] != "tiny")
    return {f"{name}-{size}": _run_of(size, model) for (name, size), model in named}


def _run_of(size: str, model: ModelConfig) -> RunConfig:
    """How the paper of a size trains, with 2**19 tokens an update."""
    if size == "tiny":
        return RunConfig(model=model)
    if size in TRELLIS_SIZES:
        rate, tokens = TRELLIS_TRAINING[size]
        return RunConfig(
            model=model,
            data=DataConfig(context_length=2048, batch_size=256, tokenizer="llama2"),
            optimizer=OptimizerConfig(learning_rate=rate),
            loop=_long_loop(round(tokens / 2**19)),
        )
    return RunConfig(
        model=model,
        data=DataConfig(context_length=32_768, batch_size=16, tokenizer="llama2"),
        loop=_long_loop(80_000),
    )


def _long_loop(steps: int) -> LoopConfig:
    return LoopConfig(steps=steps, save_every=1000, evaluate_every=1000)


def train(config: RunConfig, run_dir: Path) -> Outcome:
    """Trains, or goes on with what `run_dir` holds.

    Raises:
        ValueError: on a configuration that contradicts itself, the data, the devices
            or the checkpoints; see `memjax.training.loop.train` for the rest.
    """
    tokenizer = load_tokenizer(config.data.tokenizer)
    _require_vocabulary(config.model, tokenizer)
    mesh = sharding.make_mesh(config.mesh)
    data = batches(config, load_split(config, tokenizer, "train"))
    claim(config, run_dir, FREE_FIELDS)
    evaluate = None
    if config.loop.evaluate_every:
        evaluate = validation(config, tokenizer, abstract_model(config.model))
    state, step = build_step(config, mesh)
    _, outcome = loop.train(
        step,
        state,
        data,
        config.loop,
        run_dir,
        config_record=to_record(config) | {DIGEST: tokenizer.digest},
        tokens_per_step=config.data.batch_size * config.data.context_length,
        evaluate=evaluate,
        completed=_completed,
    )
    return outcome


def _completed(record: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's record, with defaults for fields that came later."""
    own = {name: value for name, value in record.items() if name != DIGEST}
    return record | completed(RunConfig, own)


def build_step(config: RunConfig, mesh: Any) -> tuple[TrainState, Callable]:
    """The state a new run starts from, laid out on the mesh, and the jitted update.

    Runs that differ in their seed alone share one compilation of both.
    """
    create, step = _programs(dataclasses.replace(config, seed=0), mesh)
    return create(jax.random.key(config.seed)), step


@functools.lru_cache(maxsize=8)
def _programs(config: RunConfig, mesh: Any) -> tuple[Callable, Callable]:
    """How a state is drawn from a key, and the update; nothing depends on the seed."""
    transform = optimizer(config.optimizer, config.loop.steps)

    def create(key):
        model = LanguageModel(config.model, key=key)
        rows = config.data.batch_size
        return init_train_state(model, transform, config.step, rows)

    shapes = jax.eval_shape(create, jax.random.key(0))
    layout = sharding.shardings(mesh, shapes, config.model)
    update = make_train_step(abstract_model(config.model), transform, config.step)
    return jax.jit(create, out_shardings=layout), on_mesh(update, layout, mesh)


def on_mesh(update: Callable, layout: Any, mesh: Any) -> Callable:
    """The jitted update of a state laid out so, taking this host's rows of a batch."""

    step = jax.jit(update, donate_argnums=0, out_shardings=(layout, None))

    def step_on_mesh(state, batch):
        # XLA divides the program among the devices; kernels ask which mesh is set.
        with jax.set_mesh(mesh):
            return step(state, sharding.put_batch(mesh, batch))

    return step_on_mesh


def abstract_model(config: ModelConfig) -> LanguageModel:
    """The model with shapes for parameters: its structure, at no cost."""
    return nnx.eval_shape(lambda: LanguageModel(config, key=jax.random.key(0)))


def load_model(run_dir: Path) -> tuple[RunConfig, LanguageModel]:
    """Reads a run's configuration and the newest good checkpoint's parameters.

    Raises:
        ValueError: if the folder is no run, or its checkpoint is unreadable.
    """
    config = read_config(RunConfig, run_dir)
    transform = optimizer(config.optimizer, config.loop.steps)
    model = abstract_model(config.model)
    state = jax.eval_shape(
        lambda: init_train_state(
            LanguageModel(config.model, key=jax.random.key(0)),
            transform,
            config.step,
            config.data.batch_size,
        )
    )
    return config, model_of(nnx.graphdef(model), newest_state(run_dir, state))


def with_sampling(model: Any, **changes: Any) -> LanguageModel:
    """The same parameters, the memory read at other points (Tables 5 and 6).

    Args:
        model: with an Elastic Memory layer.
        changes: any of `sampling`, `decay` and `memory_tokens`.

    Raises:
        ValueError: if no layer is an Elastic Memory, or a change is not of those.
    """
    for name in changes:
        require_known("change", name, ("sampling", "decay", "memory_tokens"))
    elastic = lambda mixer: isinstance(mixer, ElasticMemoryConfig)
    mixers = model.config.mixers if isinstance(model, LanguageModel) else ()
    if not any(map(elastic, mixers)):
        raise ValueError(
            f"{changes} needs an Elastic Memory layer; the mixers are {mixers}"
        )
    changed = lambda m: dataclasses.replace(m, **changes) if elastic(m) else m
    return with_config(model, mixers=tuple(map(changed, mixers)))


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


def validation(
    config: Settings, tokenizer: Tokenizer, model: Any
) -> Callable[[TrainState, Callable[[], bool]], dict[str, float]]:
    """Perplexity on a few texts from each validation document, of what is scored.

    `model` gives the structure alone.
    """
    length = config.data.context_length
    documents = load_split(config, tokenizer, "validation")
    share = -(-config.data.validation_texts // len(documents))
    documents = [
        d._replace(tokens=np.asarray(d.tokens[: share * length + 1])) for d in documents
    ]
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
        losses = evaluation.causal(trained, losses)
        return {
            "validation_perplexity": evaluation.perplexity(losses),
            "validation_perplexity_beyond_window": evaluation.perplexity(
                losses, first=window
            ),
        }

    return evaluate


def _require_vocabulary(model: ModelConfig, tokenizer: Tokenizer) -> None:
    if model.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"model.vocab_size={model.vocab_size} must be the tokenizer's "
            f"{tokenizer.vocab_size}"
        )


def _tiny(family: str) -> ModelConfig:
    return preset(f"{family}-tiny", 4096)
