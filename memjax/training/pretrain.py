"""Training from random parameters, and loading of its checkpoints."""

import dataclasses
import functools
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from memjax.checks import require_known
from memjax.config_io import AnyPath, completed, to_record
from memjax.data import Tokenizer, load_tokenizer
from memjax.models import LanguageModel, ModelConfig
from memjax.models.base import Model
from memjax.models.language_model.rebuilt import replace_config
from memjax.training.checkpoints.folder import check_path
from memjax.training.config import Outcome
from memjax.training.config import RunConfig as RunConfig
from memjax.training.config import presets as presets
from memjax.training.config import with_vocabulary as with_vocabulary
from memjax.training.distributed.multihost import require_same_configuration
from memjax.training.launch import Step, launch, make_programs
from memjax.training.monitoring.writers import require_installed
from memjax.training.resume import FREE_FIELDS
from memjax.training.run_data import DataConfig as DataConfig
from memjax.training.run_folder import newest_state, read_config
from memjax.training.step import TrainState, model_of
from memjax.training.step import abstract_model as abstract_model

#: Field of a checkpoint's record besides those of the configuration.
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
    return launch(
        config,
        run_dir,
        tokenizer,
        lambda mesh: _programs(config.anonymous(), mesh),
        lambda create, _: create(jax.random.key(config.seed)),
        files={},
        record=to_record(config) | {DIGEST: tokenizer.digest},
        may_change=FREE_FIELDS,
        completed=_completed,
    )


def _completed(record: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's record, with defaults for fields that came later."""
    # The digest is stored with the configuration, of which it is no field.
    own = {name: value for name, value in record.items() if name != DIGEST}
    return record | completed(RunConfig, own)


# Shared by runs that differ in seed, texts, checkpoints or reports alone.
_programs = functools.lru_cache(maxsize=8)(make_programs)


def build_step(config: RunConfig, mesh: Mesh) -> tuple[TrainState, Step]:
    """The first state of a run, laid out on the mesh, and the jitted update."""
    create, step = _programs(config.anonymous(), mesh)
    return create(jax.random.key(config.seed)), step


def load_model(run_dir: AnyPath | str) -> tuple[RunConfig, LanguageModel]:
    """Configuration of a run, and the model of its newest undamaged checkpoint.

    Raises:
        ValueError: if the folder is no run, or its checkpoint is unreadable.
    """
    run_dir = check_path("run_dir", run_dir)
    config = read_config(RunConfig, run_dir)
    state = newest_state(run_dir, config.state_shapes())
    return config, model_of(nnx.graphdef(config.structure()), state)


def with_sampling(model: Model, **changes: Any) -> LanguageModel:
    """The same parameters with other sampling of the memory (Tables 5 and 6).

    Args:
        model: with an Elastic Memory layer.
        changes: any of `sampling`, `decay` and `memory_tokens`.

    Raises:
        ValueError: if no layer is an Elastic Memory, or a change is not of those.
    """
    for name in changes:
        require_known("change", name, ("sampling", "decay", "memory_tokens"))
    mechanisms = model.backbone.config.mechanisms if model.backbone is model else ()
    if not any(m.name == "elastic_memory" for m in mechanisms):
        raise ValueError(
            f"{changes} needs an Elastic Memory layer; the mechanisms are {mechanisms}"
        )
    changed: list[Any] = list(mechanisms)
    for i, mechanism in enumerate(changed):
        if mechanism.name == "elastic_memory":
            changed[i] = dataclasses.replace(mechanism, **changes)
    return replace_config(model.backbone, mechanisms=tuple(changed))


def _require_vocabulary(model: ModelConfig, tokenizer: Tokenizer) -> None:
    if model.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"model.vocab_size={model.vocab_size} must be the tokenizer's "
            f"{tokenizer.vocab_size}"
        )
