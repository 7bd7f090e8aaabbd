"""Models, facts and text of knowledge retention, as its options say."""

from pathlib import Path

import jax

from experiments.lab import backbones
from experiments.mplus import retriever
from experiments.mplus.retention import variants
from experiments.mplus.retention.config import SCALES, Config
from experiments.mplus.samples import book_passages
from memjax.data import (
    Passage,
    Question,
    Tokenizer,
    load_facts,
    load_passages,
    load_tokenizer,
    read_passages,
    read_questions,
)
from memjax.data.mplus_tasks.fact_tasks import FACTS_SEED, split_facts
from memjax.models.mplus.build import add_mplus
from memjax.models.mplus.model import MPlus
from memjax.training.finetune import finetune


def load(config: Config) -> tuple[MPlus, Tokenizer, bool]:
    """M+ with its backbone and tokenizer, and whether it has been trained."""
    if config.model is not None:
        return *load_trained("model", config.model), True
    if config.backbone == "smollm2":
        path = backbones.smollm2()
    else:
        path = Path(config.backbone)
    found = finetune.load_backbone(path)
    memory = SCALES[config.preset].memory
    model = add_mplus(found.model, memory, key=jax.random.key(config.seed))
    return model, found.tokenizer, False


def load_trained(name: str, folder: Path) -> tuple[MPlus, Tokenizer]:
    """A fine-tuned M+ or MemoryLLM and its tokenizer; `name` is the option's."""
    described, model = finetune.load_model(folder)
    if not isinstance(model, MPlus):
        raise ValueError(
            f"{name}={str(folder)!r} must be a fine-tuned M+ or MemoryLLM, "
            f"got {type(model).__name__}"
        )
    return model, load_tokenizer(described.data.tokenizer)


def load_memoryllm(folder: Path, tokenizer: Tokenizer) -> MPlus:
    """A MemoryLLM that was trained itself.

    Raises:
        ValueError: if the folder has another model, or one of another tokenizer.
    """
    model, its_own = load_trained("memoryllm", folder)
    if model.config.num_retrieved:
        raise ValueError(
            f"memoryllm={str(folder)!r} must be a MemoryLLM, got an M+ with "
            f"num_retrieved={model.config.num_retrieved}"
        )
    if its_own.digest != tokenizer.digest:
        raise ValueError(
            f"memoryllm={str(folder)!r} must have the tokenizer of the others, it has "
            "another"
        )
    return model


def with_options(config: Config, model: MPlus) -> MPlus:
    """The model with the store, the reads and the retriever of the options."""
    if config.store or config.retrieved:
        model = variants.with_store(model, config.store, config.retrieved)
    if config.retriever is not None:
        model = retriever.read(model, config.retriever)
    return model


def facts_of(config: Config) -> list[Question]:
    """The facts to draw from: those of the subjects that are not trained on, or others.

    M+'s lessons state the facts of the training subjects with answers that are drawn
    anew, so their own answers are not learned: settings are chosen by them.
    """
    if config.facts is not None:
        return read_questions(config.facts)
    trained, others = split_facts(load_facts(), seed=FACTS_SEED)
    return others if config.split == "test" else trained


def passages(config: Config) -> list[list[Passage]]:
    """Text to inject, in groups: the first is used up before the next."""
    if config.passages is not None:
        return [read_passages(config.passages)]
    return [load_passages(), book_passages()]
