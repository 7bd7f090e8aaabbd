"""How a model was trained, read from its run's folder: for results and captions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memjax.config_io import AnyPath
from memjax.training.checkpoints.checkpoint import open_folder
from memjax.training.finetune.mplus_stage import MPlusStage
from memjax.training.finetune.run import later_stage, read_run
from memjax.training.run_folder import CHECKPOINTS


def recipe(folder: Path) -> list[dict[str, Any]]:
    """The stages that a run of M+ or MemoryLLM went through, as JSON.

    Stages before it are those in the folders beside it, where the run began with one.

    Raises:
        ValueError: if the folder is no such run, or has no checkpoint.
    """
    last = later_stage(folder) or folder
    order = ("stage1", "stage2", "stage3")
    # A stage that began with another names it by a digest alone.
    began = bool(read_run(last).start_digest) and last.name in order
    names = order[: order.index(last.name)] if began else ()
    before = [last.parent / name for name in names]
    return [_stage(x) for x in (*(x for x in before if x.is_dir()), last)]


def _stage(folder: AnyPath) -> dict[str, Any]:
    run = read_run(folder)
    stage = run.config
    if not isinstance(stage, MPlusStage):
        raise ValueError(
            f"{folder} must be a run of M+ or MemoryLLM, got one of {stage.memory_name}"
        )
    steps = open_folder(folder / CHECKPOINTS).steps()
    if not steps:
        raise ValueError(f"{folder} has no checkpoint yet")
    updates, rows = max(steps), stage.data.batch_size
    return {
        "trained": "M+" if stage.memory.num_retrieved else "MemoryLLM",
        "stage": folder.name if run.start_digest or folder.name == "stage1" else "",
        "updates": updates,
        "of_updates": stage.loop.steps,
        "texts_an_update": rows,
        "target_tokens": updates * rows * stage.tasks.target,
        "learning_rate": stage.optimizer.learning_rate,
        "retriever_rate": stage.retriever_rate,
        "retriever_documents": stage.retriever_documents,
        "lora_rank": stage.memory.rank,
        "lora_alpha": stage.memory.alpha,
        "tasks_ask": stage.tasks.ask,
        "source": stage.data.source,
        "seed": stage.seed,
        "backbone": Path(run.origin).name,
    }


def in_words(stages: Sequence[dict[str, Any]]) -> str:
    """A recipe for a caption: who was trained, how long, how fast, with which seed."""
    said = []
    for stage in stages:
        name = " ".join(filter(None, (stage["trained"], stage["stage"])))
        said.append(
            f"{name} {stage['updates']} updates of {stage['texts_an_update']} texts, "
            f"learning rate {stage['learning_rate']:g}, "
            f"LoRA rank {stage['lora_rank']}, seed {stage['seed']}"
        )
    return "; ".join(said)
