"""Fact tasks: chunks that state facts, and targets that query them.

The chunks are running text about one subject, with facts among its sentences. The
target is questions about them, of which only the short answers are scored. Each answer
is sampled from those of all subjects, so that it can be known from the chunks only.

Facts are clozes: a question ends with the beginning of the sentence that answers it,
which is part of the context (`facts.py`).

Shapes: n chunks, C longest chunk, T tokens of a target.
"""

import functools
import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from memjax.data.batches.sampling import StepRandom, shuffled
from memjax.data.documents.tokenizer import Tokenizer
from memjax.data.mplus_tasks.tasks import Target
from memjax.data.tasks.questions import Question

#: Seed of the split into facts to train on and facts to test with.
FACTS_SEED = 0
#: Maximum number of facts in a chunk.
MAX_FACTS = 6
_ANSWER = "\nAnswer: "


def split_facts(
    facts: Sequence[Question], *, seed: int
) -> tuple[list[Question], list[Question]]:
    """Facts for training and for testing, each of half of the subjects.

    Raises:
        ValueError: if seed is below 0.
    """
    # By subject, not by fact: facts of one subject share their text.
    subjects = sorted({fact.subject for fact in facts})
    order = shuffled(seed, len(subjects))
    train = {subjects[i] for i in order[: len(subjects) // 2]}
    return (
        [fact for fact in facts if fact.subject in train],
        [fact for fact in facts if fact.subject not in train],
    )


class _Fact(NamedTuple):
    """One fact, without its answer, in tokens."""

    kind: str
    answer: Int32[np.ndarray, " a"]
    question: Int32[np.ndarray, " q"]
    statement: Int32[np.ndarray, " s"]


class FactTexts:
    """Samples chunks that state facts, and targets that query them.

    Args:
        facts: clozes; those of a subject share the text around them.
        tokenizer: of the model.
        chunk: C.
        target: T.

    Raises:
        ValueError: on a fact that is no cloze, or on none.
    """

    def __init__(
        self, facts: Sequence[Question], tokenizer: Tokenizer, chunk: int, target: int
    ):
        if not facts:
            raise ValueError("facts must be at least one, got none")
        self._chunk, self._target = chunk, target
        encode = functools.cache(tokenizer.encode)
        self._end = encode(".")
        self._facts: dict[str, list[_Fact]] = {}
        self._sentences: dict[str, list[Int32[np.ndarray, " s"]]] = {}
        self._answers: dict[str, list[Int32[np.ndarray, " a"]]] = {}
        for fact in facts:
            begun = _beginning(fact)
            answer = encode(f" {fact.answer}")
            if fact.subject not in self._facts:
                # The facts are cut out, to be stated with sampled answers.
                rest = fact.context.replace(f"{begun} {fact.answer}.", "")
                sentences = re.split(r"(?<=[.!?])\s+", rest)
                self._sentences[fact.subject] = [encode(f" {s}") for s in sentences]
            made = _Fact(
                kind=fact.kind,
                answer=answer,
                question=encode(f"\n\n{fact.question}"),
                statement=encode(f" {begun}"),
            )
            self._facts.setdefault(fact.subject, []).append(made)
            self._answers.setdefault(fact.kind, []).append(answer)
        self._subjects = sorted(self._facts)

    def batch_element(
        self, rng: StepRandom, lengths: Sequence[int]
    ) -> tuple[Int32[np.ndarray, "n C"], Target]:
        """Chunks of the given lengths and their target, for one batch element."""
        subject = self._subjects[rng.integers(len(self._subjects))]
        sentences, facts = self._sentences[subject], self._facts[subject]
        order = rng.permutation(len(facts))
        first = rng.integers(len(sentences))
        text = itertools.cycle(sentences[first:] + sentences[:first])
        chunks = np.zeros((len(lengths), self._chunk), np.int32)
        stated: list[_Fact] = []
        for i, length in enumerate(lengths):
            some = [self._answered(rng, facts[j]) for j in order[i :: len(lengths)]]
            chunks[i, :length], fit = _state_facts(rng, text, some[:MAX_FACTS], length)
            stated += fit
        return chunks, self._questions(
            [stated[i] for i in rng.permutation(len(stated))]
        )

    def _answered(self, rng, fact):
        """The fact with a sampled answer of its kind."""
        answers = self._answers[fact.kind]
        answer = answers[rng.integers(len(answers))]
        statement = np.concatenate([fact.statement, answer, self._end])
        return fact._replace(answer=answer, statement=statement)

    def _questions(self, facts):
        """As many complete questions as fit, one after another."""
        tokens, scored, size = [], [], 0
        for fact in facts:
            size += len(fact.question) + len(fact.answer)
            if size > self._target + 1:
                break
            tokens += [fact.question, fact.answer]
            scored += [np.zeros(len(fact.question)), np.ones(len(fact.answer))]
        whole = np.concatenate([np.zeros(0, np.int32), *tokens])
        counts = np.concatenate([np.zeros(0), *scored])
        pad = (0, self._target + 1 - len(whole))
        whole, counts = np.pad(whole, pad), np.pad(counts, pad)
        return Target(
            tokens=whole[:-1].astype(np.int32),
            targets=whole[1:].astype(np.int32),
            mask=counts[1:].astype(np.float32),
        )


def _state_facts(rng, text, facts, length):
    """Exactly `length` tokens of sentences, with the facts that fit among them."""
    ends = np.cumsum([len(fact.statement) for fact in facts])
    facts = facts[: int(np.searchsorted(ends, length, side="right"))]
    space = length - sum(len(fact.statement) for fact in facts)
    parts, size = [], 0
    while size < space:
        parts.append(next(text)[: space - size])
        size += len(parts[-1])
    for fact in facts:
        parts.insert(rng.integers(len(parts) + 1), fact.statement)
    return np.concatenate(parts), facts


def _beginning(fact: Question) -> str:
    """The beginning of the sentence that states a fact."""
    begun = fact.question.rpartition(_ANSWER)[2]
    if _ANSWER not in fact.question or f"{begun} {fact.answer}." not in fact.context:
        raise ValueError(
            f"facts must be clozes, whose question ends with {_ANSWER!r} and the "
            f"beginning of a sentence of the context, got {fact.question!r}"
        )
    return begun
