"""A training run from one configuration, and its model read back."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from memjax.checks import require_known
from memjax.config_io import AnyPath, completed, to_record
from memjax.data import Tokenizer, load_tokenizer
from memjax.mechanisms import ElasticMemoryConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.base import Model
from memjax.models.language_model.rebuilt import replace_config
from memjax.training import loop
from memjax.training.checkpoints.folder import check_path
from memjax.training.config import DataConfig as DataConfig
from memjax.training.config import LoopConfig, Outcome
from memjax.training.config import RunConfig as RunConfig
from memjax.training.config import presets as presets
from memjax.training.config import with_vocabulary as with_vocabulary
from memjax.training.distributed import sharding
from memjax.training.distributed.multihost import require_same_configuration
from memjax.training.monitoring import header
from memjax.training.monitoring.model_flops import flops_per_token
from memjax.training.monitoring.writers import require_installed
from memjax.training.optimizer import OptimizerConfig, make_optimizer, schedule
from memjax.training.resume import FREE_FIELDS
from memjax.training.run_data import batches, load_sources, shortest, validation
from memjax.training.run_folder import (
    RunFolder,
    newest_state,
    read_config,
    record_config,
)
from memjax.training.step import (
    TrainState,
    init_train_state,
    make_train_step,
    model_of,
)

#: Beside the configuration in a checkpoint's record.
DIGEST = "tokenizer_digest"


def train(config: RunConfig, run_dir: AnyPath | str) -> Outcome:
    """Trains a model, or resumes the run in `run_dir`, a folder or a bucket's URL.

    Raises:
        ValueError: on a configuration that contradicts itself, the data, the devices
            or the checkpoints; see `memjax.training.loop.train` for the rest.
        LockedError: another process trains in `run_dir`.
    """
    check_path("run_dir", run_dir)
    require_installed(config.loop.writers)
    require_same_configuration(to_record(config) | {"run_dir": str(run_dir)})
    tokenizer = load_tokenizer(config.data.tokenizer)
    _require_vocabulary(config.model, tokenizer)
    mesh = sharding.make_mesh(config.mesh)
    sharding.require_divides(
        mesh, config.data.batch_size, config.model, config.data.context_length
    )
    sources = load_sources(config.data, tokenizer, "train")
    data = batches(config, sources, sharding.host_part(mesh))
    model = abstract_model(config.model)
    tokens_per_step = config.data.batch_size * config.data.context_length
    with RunFolder(run_dir) as folder:
        record_config(config, folder, FREE_FIELDS)
        header.show(
            config.data,
            config.loop,
            model,
            mesh,
            sources,
            tokenizer,
            tokens_per_step=tokens_per_step,
            shortest=shortest(config.data.mode, config.data.context_length),
        )
        evaluate = None
        if config.loop.evaluate_every:
            evaluate = validation(config, tokenizer, model)
        state, step = build_step(config, mesh)
        flops = flops_per_token(model, config.data.context_length) * tokens_per_step
        header.show_cost(state, flops)
        _, outcome = loop.train(
            step,
            state,
            data,
            config.loop,
            folder,
            config_record=to_record(config) | {DIGEST: tokenizer.digest},
            tokens_per_step=tokens_per_step,
            evaluate=evaluate,
            completed=_completed,
            flops_per_step=flops,
        )
    return outcome


def _completed(record: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's record, with defaults for fields that came later."""
    # The digest stands beside the configuration, of which it is no field.
    own = {name: value for name, value in record.items() if name != DIGEST}
    return record | completed(RunConfig, own)


def build_step(config: RunConfig, mesh: Mesh) -> tuple[TrainState, Callable]:
    """The state a new run starts from, laid out on the mesh, and the jitted update.

    Runs that differ in their seed, texts, checkpoints or reports alone share one
    compilation of both.
    """
    shared = dataclasses.replace(
        config,
        data=DataConfig(
            mode=config.data.mode,
            context_length=config.data.context_length,
            batch_size=config.data.batch_size,
        ),
        loop=LoopConfig(steps=config.loop.steps),
        seed=0,
    )
    create, step = _programs(shared, mesh)
    return create(jax.random.key(config.seed)), step


# Kept between calls: see `build_step`.
@functools.lru_cache(maxsize=8)
def _programs(config: RunConfig, mesh: Mesh) -> tuple[Callable, Callable]:
    """How a state is drawn from a key, and the update; nothing depends on the seed."""
    create, layout, update = parts(config, mesh)
    return jax.jit(create, out_shardings=layout), on_mesh(update, layout, mesh)


def parts(config: RunConfig, mesh: Mesh) -> tuple[Callable, Any, Callable]:
    """What a run is made of: state of a key, where its arrays lie, and the update."""
    transform = make_optimizer(config.optimizer, config.loop.steps)

    def create(key):
        model = LanguageModel(config.model, key=key)
        rows = config.data.batch_size
        return init_train_state(model, transform, config.step, rows)

    # The layout is known before any array is: each is created where it belongs.
    shapes = jax.eval_shape(create, jax.random.key(0))
    layout = sharding.shardings(mesh, shapes, config.model)
    update = make_train_step(abstract_model(config.model), transform, config.step)
    return create, layout, saying_rate(update, config.optimizer, config.loop.steps)


def saying_rate(update: Callable, config: OptimizerConfig, steps: int) -> Callable:
    """The update, with the learning rate of its step among the metrics."""
    rate = schedule(config, steps)

    def update_and_say_rate(state, batch):
        new, metrics = update(state, batch)
        # The optimizer's own count: a skipped step has no rate.
        found = optax.tree_utils.tree_get_all_with_path(state.optimizer, "count")
        return new, metrics | {"learning_rate": rate(found[0][1])}

    return update_and_say_rate


def on_mesh(update: Callable, layout: Any, mesh: Mesh) -> Callable:
    """The jitted update of a state laid out so, taking this host's rows of a batch."""
    step = jitted(update, layout)

    def step_on_mesh(state, batch):
        # XLA divides the program among the devices; kernels ask which mesh is set.
        with jax.set_mesh(mesh):
            return step(state, sharding.put_batch(mesh, batch))

    return step_on_mesh


def jitted(update: Callable, layout: Any) -> Any:
    """The update as the program that runs, of a state and a batch on the devices."""
    # Donated: parameters and moments are updated in place, without a second copy.
    return jax.jit(update, donate_argnums=0, out_shardings=(layout, None))


def abstract_model(config: ModelConfig) -> LanguageModel:
    """The model with shapes for parameters: its structure, at no cost."""
    return nnx.eval_shape(lambda: LanguageModel(config, key=jax.random.key(0)))


def load_model(run_dir: AnyPath | str) -> tuple[RunConfig, LanguageModel]:
    """Reads a run's configuration and the newest good checkpoint's parameters.

    Raises:
        ValueError: if the folder is no run, or its checkpoint is unreadable.
    """
    run_dir = check_path("run_dir", run_dir)
    config = read_config(RunConfig, run_dir)
    transform = make_optimizer(config.optimizer, config.loop.steps)
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


def with_sampling(model: Model, **changes: Any) -> LanguageModel:
    """The same parameters, the memory read at other points (Tables 5 and 6).

    Args:
        model: with an Elastic Memory layer.
        changes: any of `sampling`, `decay` and `memory_tokens`.

    Raises:
        ValueError: if no layer is an Elastic Memory, or a change is not of those.
    """
    for name in changes:
        require_known("change", name, ("sampling", "decay", "memory_tokens"))
    elastic = lambda mechanism: isinstance(mechanism, ElasticMemoryConfig)
    mechanisms = model.config.mechanisms if isinstance(model, LanguageModel) else ()
    if not isinstance(model, LanguageModel) or not any(map(elastic, mechanisms)):
        raise ValueError(
            f"{changes} needs an Elastic Memory layer; the mechanisms are {mechanisms}"
        )
    changed = lambda m: dataclasses.replace(m, **changes) if elastic(m) else m
    return replace_config(model, mechanisms=tuple(map(changed, mechanisms)))


def _require_vocabulary(model: ModelConfig, tokenizer: Tokenizer) -> None:
    if model.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"model.vocab_size={model.vocab_size} must be the tokenizer's "
            f"{tokenizer.vocab_size}"
        )
