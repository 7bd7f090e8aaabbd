"""Fine-tuning a pretrained backbone, with HMT, RMT or M+ memory or with a window.

    finetune(config, backbone, run_dir)                one stage
    finetune_stages(stages, backbone, run_dir)         both stages of HMT, three of M+

A run's folder is whole: its checkpoints hold the backbone too, frozen or not, and
`load(run_dir)` needs no other file. The same call again goes on bit for bit; with a
backbone or a first stage of other parameters it is refused, by their digests.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import jax
from flax import nnx

from memjax.config_io import completed, to_record
from memjax.data import Tokenizer
from memjax.models.mplus.model import MPlus
from memjax.training import loop, sharding
from memjax.training import pretrain as run
from memjax.training.checkpoint_folder import Folder
from memjax.training.checksums import write_atomically
from memjax.training.config import DataIterator, Outcome
from memjax.training.finetune.config import FinetuneConfig, TwoStageConfig
from memjax.training.finetune.lessons import lessons, with_similarity
from memjax.training.finetune.mplus_config import MPlusStage
from memjax.training.finetune.run import (
    SECOND_STAGE,
    TOKENIZER_FILE,
    FinetuneRun,
    first_state,
    later_stage,
    structure,
    transform_of,
)
from memjax.training.finetune.run import load as load
from memjax.training.finetune.run import load_model as load_model
from memjax.training.finetune.start import digest as digest
from memjax.training.finetune.start import load_backbone as load_backbone
from memjax.training.finetune.start import starting_point
from memjax.training.mplus.step import make_task_steps
from memjax.training.resume import FREE_FIELDS
from memjax.training.run_folder import CHECKPOINTS, claim, read_config
from memjax.training.step import make_train_step

FIRST_STAGE = "stage1"
#: Fields of a `FinetuneRun` that may differ between a run and its continuation.
FREE = frozenset(f"config.{name}" for name in FREE_FIELDS)


def finetune(
    config: FinetuneConfig | MPlusStage,
    backbone: Path | None,
    run_dir: Path,
    start: Path | None = None,
) -> Outcome:
    """Trains one stage, or goes on with what `run_dir` holds.

    Args:
        config: of the stage.
        backbone: a run's folder, a Hugging Face folder or a GGUF file; may be None
            where `start` is given, whose run holds it.
        run_dir: the run's folder.
        start: folder of the stage before. HMT: a run without retrieval, whose backbone
            and first memory this one starts from; the parameters of the retrieval are
            new. M+: all that it learned; a retriever that it had not is new.

    Raises:
        ValueError: on a backbone or a start that cannot be, a run of another
            configuration or backbone in `run_dir`; see `memjax.training.loop.train`.
    """
    described, variables, stored = starting_point(config, backbone, start)
    tokenizer = stored.parse()
    mesh = sharding.make_mesh(config.mesh)
    data = batches(described, tokenizer)
    claim(described, run_dir, FREE)
    if stored.file is not None and jax.process_index() == 0:
        write_atomically(run_dir / TOKENIZER_FILE, stored.file.decode())
    if _starts_by_similarity(config, run_dir, start):
        variables = with_similarity(described, variables, tokenizer)
    evaluate = None
    if config.loop.evaluate_every:
        evaluate = run.validation(described, tokenizer, structure(described))
    create, step = _programs(_anonymous(described), mesh)
    state = create(variables, jax.random.key(config.seed))
    # The state is a copy, and the loop must be the only one to hold one.
    del variables
    _, outcome = loop.train(
        step,
        state,
        data,
        config.loop,
        run_dir,
        config_record=to_record(described),
        tokens_per_step=config.data.batch_size * _tokens_read(config),
        evaluate=evaluate,
        may_change=FREE,
        completed=functools.partial(completed, FinetuneRun),
    )
    return outcome


def finetune_two_stages(
    config: TwoStageConfig, backbone: Path, run_dir: Path
) -> Outcome:
    """Stage 1 in `run_dir/stage1`, then stage 2 in `run_dir/stage2`.

    Interrupted anywhere, the same call goes on there.
    """
    stages = ((FIRST_STAGE, config.stage1), (SECOND_STAGE, config.stage2))
    return finetune_stages(stages, backbone, run_dir)


def finetune_stages(
    stages: Iterable[tuple[str, FinetuneConfig | MPlusStage]],
    backbone: Path,
    run_dir: Path,
) -> Outcome:
    """Stages under their names in `run_dir`, each from where the one before ended.

    Interrupted anywhere, the same call goes on there.

    Raises:
        ValueError: as `finetune`, or without stages.
    """
    start, outcome = None, None
    for name, config in stages:
        outcome = finetune(config, backbone, run_dir / name, start)
        if outcome.reason != "finished":
            return outcome
        start = run_dir / name
    if outcome is None:
        raise ValueError("stages must be at least one, got none")
    return outcome


def batches(described: FinetuneRun, tokenizer: Tokenizer) -> DataIterator:
    """What the steps of a run are given, from the first on; M+: lessons."""
    config = described.config
    if isinstance(config, MPlusStage):
        hosts = jax.process_index(), jax.process_count()
        return lessons(described, tokenizer, *hosts)
    return run.batches(described, run.load_split(described, tokenizer, "train"))


def _starts_by_similarity(config, run_dir, start) -> bool:
    """Whether a run begins now, whose retriever is new and not drawn."""
    if not isinstance(config, MPlusStage) or not config.retriever_documents:
        return False
    if Folder(run_dir / CHECKPOINTS).steps():
        return False
    if start is None:
        return True
    before: FinetuneRun = read_config(FinetuneRun, later_stage(start) or start)
    return not cast(MPlusStage, before.config).memory.has_retriever


def _tokens_read(config: FinetuneConfig | MPlusStage) -> int:
    """Tokens of a row of a step that are read: of M+'s tasks the target."""
    if isinstance(config, MPlusStage):
        return config.tasks.target
    return config.context_length


# Of one stage: those of a real model are gigabytes once they are compiled.
@functools.lru_cache(maxsize=1)
def _programs(described: FinetuneRun, mesh: Any) -> tuple[Callable, Callable]:
    """How a state is made of variables, and the update."""
    config, model = described.config, structure(described)
    create = functools.partial(first_state, described)
    shapes = jax.eval_shape(create, nnx.state(model), jax.random.key(0))
    layout = sharding.shardings(mesh, shapes)
    transform = transform_of(config)
    if isinstance(config, MPlusStage):
        # The model is M+, as the configuration says.
        tasks = make_task_steps(cast(MPlus, model), transform, config.tasks.prompt)
        steps = {
            task: run.on_mesh(update, layout, mesh) for task, update in tasks.items()
        }
        step = lambda state, given: steps[given.task](state, given.lesson)
    else:
        update = make_train_step(model, transform, config.step)
        step = run.on_mesh(update, layout, mesh)
    return jax.jit(create, out_shardings=layout), step


def _anonymous(described: FinetuneRun) -> FinetuneRun:
    """Without what its programs do not depend on, so that they are compiled once."""
    config = dataclasses.replace(described.config, seed=0)
    return dataclasses.replace(
        described, config=config, backbone_digest="", start_digest=""
    )
