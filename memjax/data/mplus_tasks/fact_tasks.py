"""Tasks of facts: chunks that state facts, and targets that ask for them.

The chunks are running text about one subject, with some facts of short answers among
its sentences. The target is questions about them, of which only the answers are scored.
Each answer is drawn anew from those of all subjects, so that it can only be known from
the chunks.

Facts are clozes: a question ends with the beginning of the sentence that answers it,
which also stands in the context (`facts.py`).

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
#: Most facts in a chunk.
MOST_FACTS = 6
_ANSWER = "\nAnswer: "


def split_facts(
    facts: Sequence[Question], *, seed: int
) -> tuple[list[Question], list[Question]]:
    """Facts to train on, and those of the other half of the subjects to test with.

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
    """Draws chunks that state facts, and targets that ask for them.

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
            tokens = (encode(f"\n\n{fact.question}"), encode(f" {begun}"))
            if fact.subject not in self._facts:
                # The stated facts are taken out, and put back with answers that are
                # drawn.
                rest = fact.context.replace(f"{begun} {fact.answer}.", "")
                sentences = re.split(r"(?<=[.!?])\s+", rest)
                self._sentences[fact.subject] = [encode(f" {s}") for s in sentences]
            made = _Fact(fact.kind, answer, *tokens)
            self._facts.setdefault(fact.subject, []).append(made)
            self._answers.setdefault(fact.kind, []).append(answer)
        self._subjects = sorted(self._facts)

    def batch_element(
        self, draws: StepRandom, lengths: Sequence[int]
    ) -> tuple[Int32[np.ndarray, "n C"], Target]:
        """Chunks of the given lengths and their target, for one batch element."""
        subject = self._subjects[draws.below(len(self._subjects))]
        sentences, facts = self._sentences[subject], self._facts[subject]
        order = draws.order(len(facts))
        first = draws.below(len(sentences))
        text = itertools.cycle(sentences[first:] + sentences[:first])
        chunks = np.zeros((len(lengths), self._chunk), np.int32)
        stated: list[_Fact] = []
        for i, length in enumerate(lengths):
            some = [self._answered(draws, facts[j]) for j in order[i :: len(lengths)]]
            chunks[i, :length], fit = _state_facts(
                draws, text, some[:MOST_FACTS], length
            )
            stated += fit
        return chunks, self._questions([stated[i] for i in draws.order(len(stated))])

    def _answered(self, draws, fact):
        """The fact with the answer of any subject."""
        answers = self._answers[fact.kind]
        answer = answers[draws.below(len(answers))]
        statement = np.concatenate([fact.statement, answer, self._end])
        return fact._replace(answer=answer, statement=statement)

    def _questions(self, facts):
        """Questions one after another, as many as fit whole."""
        tokens, scored, size = [], [], 0
        for fact in facts:
            size += len(fact.question) + len(fact.answer)
            if size > self._target + 1:
                break
            tokens += [fact.question, fact.answer]
            scored += [np.zeros(len(fact.question)), np.ones(len(fact.answer))]
        whole = np.concatenate([np.zeros(0, np.int32), *tokens])
        counts = np.concatenate([np.zeros(0), *scored])
        pad = lambda x, size: np.pad(x, (0, size - len(x)))
        whole, counts = (pad(x, self._target + 1) for x in (whole, counts))
        return Target(
            tokens=whole[:-1].astype(np.int32),
            targets=whole[1:].astype(np.int32),
            mask=counts[1:].astype(np.float32),
        )


def _state_facts(draws, text, facts, length):
    """Exactly `length` tokens of sentences, with the facts that fit among them."""
    ends = np.cumsum([len(fact.statement) for fact in facts])
    facts = facts[: int(np.searchsorted(ends, length, side="right"))]
    room = length - sum(len(fact.statement) for fact in facts)
    parts, size = [], 0
    while size < room:
        parts.append(next(text)[: room - size])
        size += len(parts[-1])
    for fact in facts:
        parts.insert(draws.below(len(parts) + 1), fact.statement)
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
