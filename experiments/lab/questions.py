"""Questions that a model is asked: needles in an essay, facts with text in between."""

from collections.abc import Sequence

import numpy as np

from memjax.data import (
    NEEDLE_TASKS,
    Passage,
    Question,
    Tokenizer,
    load_facts,
    load_passages,
    needle_sample,
    pick_facts,
    unrelated,
)
from memjax.data.documents.sources import open_documents
from memjax.data.mplus_tasks.fact_tasks import FACTS_SEED, split_facts
from memjax.data.tasks.questions import QuestionInput


def needle_input(
    tokenizer: Tokenizer, essay: Sequence[str], length: int, depth: int, seed: int
) -> QuestionInput:
    """RULER's number in an essay, at a depth in percent."""
    sample = needle_sample(
        [seed, length, depth, 0],
        NEEDLE_TASKS["S-NIAH-N"],
        length,
        tokenizer,
        essay,
        start="random",
        depth=depth,
    )
    item = Question(sample.prompt, "", sample.answer)
    return _input(tokenizer, sample.prompt, sample.answer, item)


def essay_words(source: str) -> list[str]:
    """Words that needles are hidden in: the prose of the validation split."""
    texts = [
        document.text
        for document in open_documents(source)
        if (document.split, document.kind) == ("validation", "prose")
    ]
    if not texts:
        raise ValueError(f"source={source!r} has no prose in its validation split")
    return " ".join(texts).split()


def fact_inputs(
    tokenizer: Tokenizer, count: int, distance: int, seed: int
) -> list[QuestionInput]:
    """Facts of subjects held out from training, each asked `distance` tokens later."""
    asked = pick_facts(split_facts(load_facts(), seed=FACTS_SEED)[1], seed=seed)
    if len(asked) < count:
        raise ValueError(f"facts must be at most {len(asked)}, got {count}")
    passages = load_passages()
    return [fact_input(tokenizer, x, passages, distance) for x in asked[:count]]


def fact_input(
    tokenizer: Tokenizer, fact: Question, passages: Sequence[Passage], distance: int
) -> QuestionInput:
    """A fact's context, `distance` tokens of unrelated text, and its question."""
    between, number = [], 0
    # Other texts for other facts, the same for every model.
    allowed = unrelated(passages, fact)
    start = len(fact.context) % len(allowed)
    for passage in (*allowed[start:], *allowed[:start]):
        if number >= distance:
            break
        between.append(tokenizer.encode(f"\n\n{passage.text}"))
        number += len(between[-1])
    if number < distance:
        raise ValueError(f"distances must be at most {number}, got {distance}")
    filler = np.concatenate([np.zeros(0, np.int32), *between])[:distance]
    context = tokenizer.encode(fact.context)
    asked = _input(tokenizer, f"\n\n{fact.question}", fact.answer, fact)
    before = np.concatenate([context, filler]).astype(np.int32)
    tokens = np.concatenate([before, asked.tokens])
    return asked._replace(tokens=tokens, answer=len(before) + asked.answer)


def _input(tokenizer, prompt: str, answer: str, item: Question) -> QuestionInput:
    # Encoded apart, so that no token has a part of both.
    head, tail = tokenizer.encode(prompt), tokenizer.encode(f" {answer}")
    return QuestionInput(np.concatenate([head, tail]), len(head), item, 0, 1)
