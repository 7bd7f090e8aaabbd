"""Fine-tuning a pretrained backbone, with a memory of any kind or with a window.

    finetune(stage, backbone, run_dir)                    one stage
    finetune_stages(config.stages(), backbone, run_dir)   all of HMT, M+, or a retrofit

A run's folder is whole: its checkpoints hold the backbone too, frozen or not, and
`load(run_dir)` needs no other file. The same call again resumes bit for bit; with a
backbone or a first stage of other parameters it is refused, by their digests.
"""

import functools
from collections.abc import Callable, Iterable

import jax
from flax import nnx
from jax.sharding import Mesh

from memjax.config_io import AnyPath, completed, to_record
from memjax.training import loop, pretrain, run_data
from memjax.training.checkpoints.checkpoint import open_folder
from memjax.training.checkpoints.checksums import write_atomically
from memjax.training.checkpoints.folder import check_path
from memjax.training.config import Outcome
from memjax.training.distributed import sharding
from memjax.training.distributed.multihost import require_same_configuration
from memjax.training.finetune.run import (
    AnyStage,
    FinetuneRun,
    state_shapes,
)
from memjax.training.finetune.run import load as load
from memjax.training.finetune.run import load_model as load_model
from memjax.training.finetune.start import digest as digest
from memjax.training.finetune.start import load_backbone as load_backbone
from memjax.training.finetune.start import starting_point
from memjax.training.monitoring import header
from memjax.training.monitoring.model_flops import flops_per_tuned_token
from memjax.training.monitoring.writers import require_installed
from memjax.training.resume import FREE_FIELDS
from memjax.training.run_folder import RunFolder, record_config
from memjax.training.step import TrainState

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
        stage: what is trained, on what, and how.
        backbone: a model as `memjax.load` takes it; may be None
            where `start` is given, whose run holds it.
        run_dir: the run's folder.
        start: folder of the stage before. HMT: a run without retrieval, whose backbone
            and first memory this one starts from; the parameters of the retrieval are
            new. M+: all that it learned; a retriever that it had not is new.

    Raises:
        ValueError: on a backbone or a start that cannot be, a run of another
            configuration or backbone in `run_dir`; see `memjax.training.loop.train`.
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
    tokens = stage.data.batch_size * stage.tokens_read
    asked = {"backbone": backbone and str(backbone), "run_dir": str(run_dir)}
    require_same_configuration(to_record(stage) | asked)
    described, model, stored, before = starting_point(stage, backbone, start)
    tokenizer = stored.tokenizer
    mesh = sharding.make_mesh(stage.mesh)
    sizes = (stage.data.batch_size, described.language_model, stage.tokens_read)
    sharding.require_divides(mesh, *sizes)
    documents = run_data.load_split(described, tokenizer, "train")
    index, count = sharding.host_part(mesh)
    hosts = {"shard_index": index, "shard_count": count}
    vocab_size = described.model.vocab_size
    data = stage.batches(documents, tokenizer, vocab_size, **hosts)
    # Before the work starts: another run's folder is refused at once.
    with RunFolder(run_dir) as folder:
        record_config(described, folder, FREE)
        if jax.process_index() == 0:
            for name, content in stored.files().items():
                write_atomically(folder.files / name, content.decode())
        header.show(
            described.data,
            stage.loop,
            described.structure(),
            mesh,
            [documents],
            tokenizer,
            tokens_per_step=tokens,
            shortest=stage.shortest_document,
        )
        evaluate = None
        if stage.loop.evaluate_every:
            evaluate = run_data.validation(described, tokenizer, described.structure())
        # Not before they are needed: a finished stage takes no step.
        programs = functools.cache(lambda: _programs(described.anonymous(), mesh))
        if open_folder(folder.checkpoints).steps():
            # A resumed run takes its arrays from the checkpoint: nothing to prepare.
            state = _laid_out(described, mesh)
        else:
            model = stage.prepare(model, described.model, before, documents, tokenizer)
            state = programs()[0](nnx.state(model), jax.random.key(stage.seed))
        flops = tokens * flops_per_tuned_token(
            pretrain.abstract_model(described.model), state.params, state.frozen
        )
        header.show_cost(state, flops)
        # The state is a copy, and the loop must be the only one to hold one.
        del model
        _, outcome = loop.train(
            lambda state, batch: programs()[1](state, batch),
            state,
            data,
            stage.loop,
            folder,
            config_record=to_record(described),
            tokens_per_step=tokens,
            flops_per_step=flops,
            evaluate=evaluate,
            may_change=FREE,
            completed=functools.partial(completed, FinetuneRun),
        )
    return outcome


def finetune_stages(
    stages: Iterable[tuple[str, AnyStage]],
    backbone: AnyPath | str | None,
    run_dir: AnyPath,
    start: AnyPath | None = None,
) -> Outcome:
    """Stages under their names in `run_dir`, each from where the one before ended.

    After an interruption the same call resumes where it was.

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


def _laid_out(described: FinetuneRun, mesh: Mesh) -> TrainState:
    """The run's state with shapes for arrays, each with its place on the mesh."""
    shapes = state_shapes(described)
    layout = sharding.shardings(mesh, shapes, described.language_model)
    placed = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    return jax.tree.map(placed, shapes, layout)


# Of one stage: those of a real model are gigabytes once they are compiled.
@functools.lru_cache(maxsize=1)
def _programs(described: FinetuneRun, mesh: Mesh) -> tuple[Callable, Callable]:
    """Two compiled programs: variables to first state, and the update."""
    layout = sharding.shardings(mesh, state_shapes(described), described.language_model)
    create = functools.partial(FinetuneRun.first_state, described)
    stage = described.config
    rated = lambda update: pretrain.saying_rate(
        update, stage.optimizer, stage.loop.steps
    )
    compiled = lambda update: pretrain.on_mesh(rated(update), layout, mesh)
    step = stage.make_step(described.structure(), described.model, compiled)
    return jax.jit(create, out_shardings=layout), step
