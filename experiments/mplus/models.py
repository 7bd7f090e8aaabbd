"""Trained models of M+ and MemoryLLM, their recipes, and facts and text to inject."""

import dataclasses
from pathlib import Path
from typing import Any, cast

from memjax import data
from memjax.data import Passage, Question, Tokenizer, load_passages, load_tokenizer
from memjax.data.documents.sources import open_documents
from memjax.data.mplus_tasks.fact_tasks import FACTS_SEED, split_facts
from memjax.models.mplus.model import MPlus
from memjax.training import run_data
from memjax.training.finetune import finetune
from memjax.training.finetune.mplus_presets import presets
from memjax.training.finetune.mplus_stage import MPlusStage
from memjax.training.finetune.run import read_run

#: Sizes and tasks are those of its stages in `memjax finetune`.
PRESET = "mplus-smollm2-135m"
#: Characters of a passage that is cut from a book, about 400 tokens.
PASSAGE = 1_700


def stage(number: int) -> MPlusStage:
    """A stage of the preset."""
    return cast(MPlusStage, presets()[f"{PRESET}-stage{number}"])


def stages(
    updates: int, rate: float, seed: int, store: bool
) -> tuple[tuple[str, MPlusStage], ...]:
    """All stages of M+, or the first two, MemoryLLM's, of so many updates together.

    Targets are revisited at the paper's distances: short documents are kept for longer,
    long ones are renewed.
    """
    names = ("stage1", "stage2", "stage3")[: 3 if store else 2]
    found = []
    for i, name in enumerate(names):
        own = stage(i + 1)
        revisits = {"stage1": {"replace": 0.2}, "stage2": {"renew": 0.6}}.get(name, {})
        # All of them, where they cannot be divided.
        count = updates * (i + 1) // len(names) - updates * i // len(names)
        changed = dataclasses.replace(
            own,
            tasks=dataclasses.replace(own.tasks, **revisits),
            optimizer=dataclasses.replace(own.optimizer, learning_rate=rate),
            loop=dataclasses.replace(own.loop, steps=count),
            seed=seed,
        )
        found.append((name, changed))
    return tuple(found)


def load_trained(folder: Path) -> tuple[MPlus, Tokenizer]:
    """A fine-tuned M+ or MemoryLLM and its tokenizer."""
    described, model = finetune.load_model(folder)
    return cast(MPlus, model), load_tokenizer(described.data.tokenizer)


def load_facts() -> list[Question]:
    """Facts of subjects that the training tasks of M+ do not name."""
    return split_facts(data.load_facts(), seed=FACTS_SEED)[1]


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


def with_attention_retrieval(model: MPlus) -> MPlus:
    """M+-Attn of the same parameters: attention scores replace the retriever.

    The store is on the device, where every token searches it.
    """
    config = dataclasses.replace(
        model.config,
        retrieval="attention",
        retrieval_source="prefix",
        store_memory="device",
    )
    return model.replace(config=config)


def with_fitted_retriever(model: MPlus, tokenizer: Tokenizer, folder: Path) -> MPlus:
    """M+ with a retriever fitted by similarity to documents of its run."""
    run = read_run(folder)
    documents = run_data.load_split(run, tokenizer, "train")
    return cast(MPlusStage, run.config).fit_retriever(model, documents, tokenizer)


def recipe_text(stage: dict[str, Any]) -> str:
    """A stage of a recipe for a caption: model, updates, learning rate and seed."""
    name = " ".join(filter(None, (stage["trained"], stage["stage"])))
    return (
        f"{name} {stage['updates']} updates of {stage['texts_an_update']} texts, "
        f"learning rate {stage['learning_rate']:g}, "
        f"LoRA rank {stage['lora_rank']}, seed {stage['seed']}"
    )
