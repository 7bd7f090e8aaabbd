"""Questions about contexts, many contexts in one input (PubMedQA-style).

He et al. (2025), Hierarchical Memory Transformer, https://arxiv.org/abs/2405.06067:
the contexts of several questions are put one after another, and each question is asked
behind all of them. Any source of (context, question, answer) will do. Here every item
is asked once, and what is scored is the answer; the official program asks only one in
as many as are grouped, and scores the last segment.

Shapes: T tokens of an input.
"""

import collections
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from memjax.data.documents.json_lines import read_records
from memjax.data.documents.tokenizer import Tokenizer


class Question(NamedTuple):
    """One question.

    Attributes:
        context: the text that answers it.
        question: what is asked; the answer follows it after a space.
        answer: what is to be said.
        kind: what sort of question, for results by kind.
        subject: what it is about; no two of one group share it.
    """

    context: str
    question: str
    answer: str
    kind: str = ""
    subject: str = ""


class QuestionInput(NamedTuple):
    """One input and its answer.

    Attributes:
        tokens: [T] contexts, question, answer.
        answer: tokens[answer:] are the answer.
        item: what is asked.
        place: which of the contexts answers it, from 0.
        contexts: how many there are.
    """

    tokens: Int32[np.ndarray, " T"]
    answer: int
    item: Question
    place: int
    contexts: int


def read_questions(path: Path) -> list[Question]:
    """Reads JSON lines, compressed as .xz or not.

    Every line is an object with the strings "context", "question" and "answer", and
    if it likes "kind" and "subject"; other fields are left alone.

    Raises:
        ValueError: naming the line that is not so; or a file without a line.
    """
    return [
        Question(
            *map(record.text, ("context", "question", "answer")),
            *map(record.optional_text, ("kind", "subject")),
        )
        for record in read_records(path, "question")
    ]


def multi_context(
    items: Sequence[Question], group: int, tokenizer: Tokenizer
) -> list[QuestionInput]:
    """Groups items in order; each becomes an input with all contexts of its group.

    An item whose subject is already in the group waits for the next one, so that no
    two contexts answer one question. The last group has what is left.

    Args:
        items: every one is asked once.
        group: contexts of an input.
        tokenizer: prompt and answer are encoded apart, so that the answer's tokens
            are its own.

    Raises:
        ValueError: if group is below 1 or there is no item.
    """
    if group < 1:
        raise ValueError(f"group must be at least 1, got {group}")
    if not items:
        raise ValueError("items must hold at least one question")
    inputs = []
    for members in _groups(items, group):
        contexts = " ".join(item.context for item in members)
        for place, item in enumerate(members):
            # Encoded apart from the answer, so that no token has a part of both.
            prompt = tokenizer.encode(f"{contexts} {item.question}")
            answer = tokenizer.encode(f" {item.answer}")
            tokens = np.concatenate([prompt, answer])
            size = (place, len(members))
            inputs.append(QuestionInput(tokens, len(prompt), item, *size))
    return inputs


def align(
    inputs: Sequence[QuestionInput],
    segment: int,
    first: int,
    preamble: Int32[np.ndarray, " _"],
) -> list[QuestionInput]:
    """Puts text in front, so that every answer lies in [first, segment) of a segment.

    A model that reads ahead over the first tokens of a segment then knows nothing of
    the answer before it gives it. All models that are compared read the same text.

    Args:
        inputs: of `multi_context`.
        segment: L of the model.
        first: tokens of a segment that are read ahead.
        preamble: text of which the first few tokens are taken, at most `segment`.

    Raises:
        ValueError: if an answer has more than segment - first tokens, sizes are out
            of range, or the preamble is shorter than what is needed.
    """
    if not 0 <= first < segment:
        raise ValueError(
            f"first must be in [0, segment), got first={first}, segment={segment}"
        )
    return [_aligned(entry, segment, first, preamble) for entry in inputs]


def _aligned(entry, segment, first, preamble):
    size = len(entry.tokens) - entry.answer
    if size > segment - first:
        raise ValueError(
            f"the answer {entry.item.answer!r} has {size} tokens; "
            f"segment - first = {segment - first} have room"
        )
    start = entry.answer % segment
    inside = first <= start and start + size <= segment
    missing = 0 if inside else (first - start) % segment
    if missing > len(preamble):
        raise ValueError(
            f"preamble must have {missing} tokens or more, got {len(preamble)}"
        )
    tokens = np.concatenate([np.asarray(preamble[:missing]), entry.tokens])
    return entry._replace(tokens=tokens, answer=entry.answer + missing)


def _groups(items: Sequence[Question], group: int) -> list[list[Question]]:
    """Groups without two items of one subject; "" is nobody's."""
    groups: list[list[Question]] = []
    waiting = collections.deque(items)
    while waiting:
        taken, later, subjects = [], [], set()
        while waiting and len(taken) < group:
            item = waiting.popleft()
            if item.subject and item.subject in subjects:
                later.append(item)
            else:
                taken.append(item)
                subjects.add(item.subject)
        groups.append(taken)
        # Those that had to wait come first in the next group, in their order.
        waiting.extendleft(reversed(later))
    return groups
