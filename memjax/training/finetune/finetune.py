"""Fine-tuning a pretrained backbone, with a memory of any kind or with a window.

    finetune(stage, backbone, run_dir)                    one stage
    finetune_stages(config.stages(), backbone, run_dir)   all of HMT, M+, or a retrofit

A run's folder is self-contained: its checkpoints include the backbone, frozen or not.
The same call again resumes bit for bit; a backbone or previous stage with other
parameters is refused, by their digests.
"""

import functools
from collections.abc import Iterable

import jax
from flax import nnx

from memjax.config_io import AnyPath, completed, to_record
from memjax.training.checkpoints.folder import check_path
from memjax.training.config import Outcome
from memjax.training.distributed.multihost import require_same_configuration
from memjax.training.finetune.run import AnyStage, FinetuneRun
from memjax.training.finetune.run import load as load
from memjax.training.finetune.run import load_model as load_model
from memjax.training.finetune.start import digest as digest
from memjax.training.finetune.start import load_backbone as load_backbone
from memjax.training.finetune.start import starting_point
from memjax.training.launch import launch, make_programs
from memjax.training.monitoring.writers import require_installed
from memjax.training.resume import FREE_FIELDS

#: Fields of a `FinetuneRun` that may differ between a run and its continuation.
FREE = frozenset(f"config.{name}" for name in FREE_FIELDS) | {"origin"}


def finetune(
    stage: AnyStage,
    backbone: AnyPath | str | None,
    run_dir: AnyPath,
    start: AnyPath | None = None,
) -> Outcome:
    """Trains one stage, or resumes the run in `run_dir`.

    Args:
        stage: model, data and update.
        backbone: name of a model for `memjax.load`; may be None with `start`.
        run_dir: the run's folder.
        start: folder of the previous stage. HMT: a run without retrieval; backbone and
            initial memory are taken over, parameters of the retrieval are new. M+: all
            parameters are taken over; a retriever may be new.

    Raises:
        ValueError: on an unusable backbone or start, or a run of another configuration
            or backbone in `run_dir`; see `memjax.training.loop.train`.
        LockedError: another process trains in `run_dir`.
    """
    run_dir = check_path("run_dir", run_dir)
    start = None if start is None else check_path("start", start)
    if stage.mesh.sequence > 1:
        raise ValueError(
            f"mesh.sequence must be 1, got {stage.mesh.sequence}: a memory around a "
            "backbone reads its text segment by segment"
        )
    require_installed(stage.loop.writers)
    asked = {"backbone": backbone and str(backbone), "run_dir": str(run_dir)}
    require_same_configuration(to_record(stage) | asked)
    described, model, stored, before = starting_point(stage, backbone, start)
    models, tokenizer = [model], stored.tokenizer
    # Two copies of a large model do not fit.
    del model

    def first_state(create, sources):
        model = stage.prepare(
            models.pop(), described.model, before, sources[0], tokenizer
        )
        return create(nnx.state(model), jax.random.key(stage.seed))

    return launch(
        described,
        run_dir,
        tokenizer,
        lambda mesh: _programs(described.anonymous(), mesh),
        first_state,
        files=stored.files(),
        record=to_record(described),
        may_change=FREE,
        completed=functools.partial(completed, FinetuneRun),
    )


def finetune_stages(
    stages: Iterable[tuple[str, AnyStage]],
    backbone: AnyPath | str | None,
    run_dir: AnyPath,
    start: AnyPath | None = None,
) -> Outcome:
    """Trains stages in folders of `run_dir`, each from the end of the previous one.

    After an interruption the same call resumes.

    Args:
        stages: folders below `run_dir`, and the stages in them, in order.
        backbone: as `finetune`.
        run_dir: the folder of all.
        start: of the first stage, as `finetune`.

    Raises:
        ValueError: as `finetune`, or without stages.
    """
    outcome, run_dir = None, check_path("run_dir", run_dir)
    for name, stage in stages:
        outcome = finetune(stage, backbone, run_dir / name, start)
        # The next stage starts from a finished one; the same call resumes this one.
        if outcome.reason != "finished":
            return outcome
        start = run_dir / name
    if outcome is None:
        raise ValueError("stages must be at least one, got none")
    return outcome


# Of one stage: compiled programs of large models take gigabytes.
_programs = functools.lru_cache(maxsize=1)(make_programs)
