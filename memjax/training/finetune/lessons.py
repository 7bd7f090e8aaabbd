"""The lessons of an M+ run, and the retriever that starts from some of them."""

import dataclasses
from typing import Any, cast

import jax
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from memjax.data import Tokenizer, load_facts, read_questions
from memjax.data.mplus_tasks.fact_lessons import FACTS_SEED, FactTexts, split_facts
from memjax.data.mplus_tasks.lesson_batches import Lessons
from memjax.models.mplus.model import MPlus
from memjax.training import pretrain as run
from memjax.training.finetune.mplus_config import MPlusStage
from memjax.training.finetune.run import FinetuneRun, structure
from memjax.training.mplus.retriever_fit import Bank, collect, start_by_similarity

#: What a target that repeats the chunks before it begins with.
INSTRUCTION = "Repeat:"
# Of a document: chunks, tokens that ask, and rows that are kept in each layer.
CHUNKS, ASKING, ROWS = 2, 48, 64


def lessons(
    described: FinetuneRun,
    tokenizer: Tokenizer,
    shard_index: int = 0,
    shard_count: int = 1,
) -> Lessons:
    """What the steps of a run of M+ are given, from the first on."""
    config = cast(MPlusStage, described.config)
    facts = None
    if config.tasks.ask:
        found = load_facts() if config.facts is None else read_questions(config.facts)
        told, _ = split_facts(found, seed=FACTS_SEED)
        facts = FactTexts(told, tokenizer, config.memory.chunk, config.tasks.target)
    return Lessons(
        run.load_split(described, tokenizer, "train"),
        config.tasks,
        config.memory.chunk,
        config.data.batch_size,
        config.seed,
        tokenizer.encode(INSTRUCTION),
        shard_index=shard_index,
        shard_count=shard_count,
        vocab_size=described.model.vocab_size,
        facts=facts,
    )


def retriever_bank(
    described: FinetuneRun,
    model: MPlus,
    tokenizer: Tokenizer,
    documents: int,
    seed: int,
    ask: float | None = None,
) -> Bank:
    """What a retriever is given of a run's documents, the same on every host.

    Args:
        described: the run.
        model: its model, with a retriever.
        tokenizer: its tokenizer.
        documents: how many, rounded up to whole batches.
        seed: of documents and draws.
        ask: share of the documents that tell facts; None is the run's.
    """
    stage = cast(MPlusStage, described.config)
    memory, tasks = model.config, stage.tasks
    chunks = min(CHUNKS, memory.pool // memory.tokens)
    tasks = dataclasses.replace(
        tasks,
        full_context=0.0,
        revisit=0.0,
        multi_chunk=1.0,
        repeat=0.0,
        chunks=(chunks,),
        ask=tasks.ask if ask is None else ask,
    )
    stage = dataclasses.replace(stage, tasks=tasks, seed=seed)
    drawn = lessons(dataclasses.replace(described, config=stage), tokenizer)
    asking = min(ASKING, tasks.target)
    given = []
    for _ in range(-(-documents // stage.data.batch_size)):
        lesson = next(drawn).lesson
        given.append(lesson._replace(asks=np.minimum(lesson.asks, asking)))
    rows = min(ROWS, chunks * memory.tokens)
    return collect(model, given, asking, rows, jax.random.key(seed))


def with_similarity(
    described: FinetuneRun, variables: PyTree, tokenizer: Tokenizer
) -> PyTree:
    """A run's first variables with the retriever that its configuration asks for."""
    config = cast(MPlusStage, described.config)
    model: Any = nnx.merge(nnx.graphdef(structure(described)), variables)
    documents = config.retriever_documents
    bank = retriever_bank(described, model, tokenizer, documents, config.seed)
    start_by_similarity(model, bank)
    return nnx.state(model)
