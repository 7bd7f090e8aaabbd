"""Questions about one of many contexts in an input (PubMedQA-style).

He et al. (2025), Hierarchical Memory Transformer, https://arxiv.org/abs/2405.06067:
the contexts of several questions are concatenated, and each question follows all of
them. Here every question is an input, and its answer is scored; the official program
takes one question of each group, and scores the last segment.

Shapes: T tokens of an input.
"""

import collections
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from memjax.checks import check_sizes, require_all, require_instance, short
from memjax.data.documents.json_lines import read_records
from memjax.data.documents.tokenizer import Tokenizer


class Question(NamedTuple):
    """One question.

    Attributes:
        context: text with the answer.
        question: followed by a space and the answer.
        answer: the expected answer.
        kind: of the question, for results by kind.
        subject: of the question; distinct within a group.
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
        item: the question.
        place: index of its context.
        contexts: number of contexts.
    """

    tokens: Int32[np.ndarray, " T"]
    answer: int
    item: Question
    place: int
    contexts: int


def read_questions(path: Path) -> list[Question]:
    """Reads JSON lines, compressed as .xz or not.

    Every line is an object with the strings "context", "question" and "answer", and
    optionally "kind" and "subject"; other fields are ignored.

    Raises:
        ValueError: naming the line that is malformed, or if the file has none.
    """
    return [
        Question(
            context=record.text("context"),
            question=record.text("question"),
            answer=record.text("answer"),
            kind=record.optional_text("kind"),
            subject=record.optional_text("subject"),
        )
        for record in read_records(path, "question")
    ]


def multi_context(
    items: Sequence[Question], group: int, tokenizer: Tokenizer
) -> list[QuestionInput]:
    """Groups items in order; each becomes an input with all contexts of its group.

    An item with a subject of the group is moved to the next group, so that no two
    contexts answer one question. The last group may be smaller.

    Args:
        items: each becomes one input.
        group: contexts of an input.
        tokenizer: encodes prompt and answer separately, so that no token has parts of
            both.

    Raises:
        ValueError: if group is below 1 or there is no item.
    """
    check_sizes(group=group)
    require_instance("tokenizer", tokenizer, Tokenizer)
    require_all("items", items, Question)
    if not items:
        raise ValueError("items must hold at least one question")
    inputs = []
    for members in _groups(items, group):
        contexts = " ".join(item.context for item in members)
        for place, item in enumerate(members):
            prompt = tokenizer.encode(f"{contexts} {item.question}")
            answer = tokenizer.encode(f" {item.answer}")
            tokens = np.concatenate([prompt, answer])
            made = QuestionInput(tokens, len(prompt), item, place, len(members))
            inputs.append(made)
    return inputs


def align(
    inputs: Sequence[QuestionInput],
    segment: int,
    first: int,
    preamble: Int32[np.ndarray, " _"],
) -> list[QuestionInput]:
    """Prepends text, so that every answer is within [first, segment) of a segment.

    A model that reads ahead over the first tokens of a segment then cannot see the
    answer early. All models of a comparison read the same text.

    Args:
        inputs: of `multi_context`.
        segment: L of the model.
        first: tokens of a segment that are read ahead.
        preamble: text whose first tokens are prepended, at most `segment`.

    Raises:
        ValueError: if an answer has more than segment - first tokens, sizes are out
            of range, or the preamble is too short.
    """
    check_sizes(segment=segment)
    check_sizes(least=0, first=first)
    if first >= segment:
        raise ValueError(
            f"first must be in [0, segment), got first={first}, segment={segment}"
        )
    require_all("inputs", inputs, QuestionInput)
    if getattr(preamble, "ndim", None) != 1:
        raise ValueError(f"preamble must be an array of tokens, got {short(preamble)}")
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
    """Groups without two items of one subject; "" is no subject."""
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
        # Moved items come first in the next group, in their order.
        waiting.extendleft(reversed(later))
    return groups
