"""Trained models of M+ and MemoryLLM, their recipes, and facts to inject."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from memjax.data import (
    Passage,
    Question,
    Tokenizer,
    load_facts,
    load_passages,
    load_tokenizer,
)
from memjax.data.documents.sources import open_documents
from memjax.data.mplus_tasks.fact_tasks import FACTS_SEED, split_facts
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.model import MPlus
from memjax.training.checkpoints.checkpoint import open_folder
from memjax.training.finetune import finetune
from memjax.training.finetune.mplus_presets import presets
from memjax.training.finetune.mplus_stage import MPLUS, MPlusStage
from memjax.training.finetune.run import later_stage, read_run
from memjax.training.run_folder import CHECKPOINTS

#: Characters of a passage that is cut from a book, about 400 tokens.
PASSAGE = 1_700


def stage(preset: str, number: int) -> MPlusStage:
    """A stage of a preset of `memjax finetune`."""
    return cast(MPlusStage, presets()[f"{preset}-stage{number}"])


#: Sizes that `memjax finetune mplus-smollm2-135m` trains.
MEMORY: MPlusConfig = stage("mplus-smollm2-135m", 3).memory


def load_trained(name: str, folder: Path) -> tuple[MPlus, Tokenizer]:
    """A fine-tuned M+ or MemoryLLM and its tokenizer; `name` is the option's.

    Raises:
        ValueError: if the folder has another model.
    """
    described, model = finetune.load_model(folder)
    if getattr(described, "memory_name", None) != MPLUS:
        raise ValueError(
            f"{name}={str(folder)!r} must be a fine-tuned M+ or MemoryLLM, "
            f"got {type(model).__name__}"
        )
    return cast(MPlus, model), load_tokenizer(described.data.tokenizer)


def load_facts_of(split: str) -> list[Question]:
    """Facts of the "test" or "validation" split, which share no subject.

    The training tasks of M+ state facts of the validation subjects with answers that
    are drawn anew, so their own answers are not learned.
    """
    validation, test = split_facts(load_facts(), seed=FACTS_SEED)
    return test if split == "test" else validation


def passages() -> list[list[Passage]]:
    """Text to inject, in groups: the first is used up before the next."""
    return [load_passages(), book_passages()]


def book_passages() -> list[Passage]:
    """Whole paragraphs of the embedded books, some 400 tokens each."""
    cut = []
    for document in open_documents("embedded"):
        if document.kind != "prose":
            continue
        passage = ""
        for paragraph in document.text.split("\n\n"):
            passage = f"{passage}\n\n{paragraph}" if passage else paragraph
            if len(passage) >= PASSAGE:
                cut.append(Passage(passage))
                passage = ""
    return cut


def with_store(model: MPlus, rows: int = 0, retrieved: int = 0) -> MPlus:
    """M+ with the same parameters and another store.

    Args:
        model: with a store.
        rows: M of the store; 0 leaves it.
        retrieved: R of a read; 0 leaves it.

    Raises:
        ValueError: as `MPlusConfig`, or for a model without a store.
    """
    if not model.config.num_retrieved:
        raise ValueError(
            f"store={rows} and retrieved={retrieved} need a model with a store; it has "
            "none"
        )
    old = model.config
    return _with_config(
        model,
        store_size=rows or old.store_size,
        num_retrieved=retrieved or old.num_retrieved,
    )


def with_attention_retrieval(model: MPlus) -> MPlus:
    """M+-Attn of the same parameters: attention scores replace the retriever.

    The store is on the device, where every token searches it.

    Raises:
        ValueError: if the model has no retriever, or memory from a checkpoint.
    """
    config = model.config
    if not config.has_retriever or model.initial is not None:
        raise ValueError(
            "model must have a learned retriever and an empty memory, got "
            f"num_retrieved={config.num_retrieved}, retrieval={config.retrieval!r}"
        )
    return _with_config(
        model, retrieval="attention", retrieval_source="prefix", store_memory="device"
    )


def _with_config(model: MPlus, **changes: Any) -> MPlus:
    return model.replace(config=dataclasses.replace(model.config, **changes))


def recipe(folder: Path) -> list[dict[str, Any]]:
    """The training of a run of M+ or MemoryLLM as JSON.

    Raises:
        ValueError: if the folder is no such run, or has no checkpoint.
    """
    run, last = read_run(folder), later_stage(folder) or folder
    if (name := run.memory_name) != MPLUS:
        raise ValueError(
            f"{folder} must be a run of M+ or MemoryLLM, got one of {name}"
        )
    stage = cast(MPlusStage, run.config)
    steps = open_folder(last / CHECKPOINTS).steps()
    if not steps:
        raise ValueError(f"{folder} has no checkpoint yet")
    updates, rows = max(steps), stage.data.batch_size
    return [
        {
            "trained": "M+" if stage.memory.num_retrieved else "MemoryLLM",
            "stage": last.name if run.start_digest else "",
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
    ]


def recipe_text(stages: Sequence[dict[str, Any]]) -> str:
    """A recipe for a caption: model, updates, learning rate and seed."""
    found = []
    for stage in stages:
        name = " ".join(filter(None, (stage["trained"], stage["stage"])))
        found.append(
            f"{name} {stage['updates']} updates of {stage['texts_an_update']} texts, "
            f"learning rate {stage['learning_rate']:g}, "
            f"LoRA rank {stage['lora_rank']}, seed {stage['seed']}"
        )
    return "; ".join(found)
