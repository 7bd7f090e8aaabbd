"""Facts with short answers, and unrelated passages to read before their questions.

They measure knowledge retention (Wang et al., M+, https://arxiv.org/abs/2502.00592,
section 4.3): a context is read, then unrelated passages, then a question. Facts are
`Question`s of any source. The 1,774 facts that ship are made from templates and the
CIA World Factbook of 2015, which is in the public domain: see
`memjax/data/factbook/README.md`. Their question ends with the beginning of the sentence
that answers it (a cloze).
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from memjax.checks import require_all, require_instance
from memjax.data.batches.sampling import shuffled
from memjax.data.documents.json_lines import read_records
from memjax.data.tasks.questions import Question, read_questions

FACTBOOK = Path(__file__).parents[1] / "factbook"


class Passage(NamedTuple):
    """A text without a question about it.

    Attributes:
        text: some hundreds of tokens.
        subject: of the text.
    """

    text: str
    subject: str = ""


def load_facts() -> list[Question]:
    """The facts that ship: `kind` is the relation, `subject` the country."""
    return read_questions(FACTBOOK / "factbook_qa.jsonl.xz")


def load_passages() -> list[Passage]:
    """The 282 passages that ship, 300 to 500 SmolLM2 tokens each."""
    return read_passages(FACTBOOK / "factbook_prose.jsonl.xz")


def read_passages(path: Path) -> list[Passage]:
    """Reads JSON lines with "text" and, optionally, "subject"; compressed (.xz) or not.

    Raises:
        ValueError: naming the line that is malformed, or if the file has none.
    """
    return [
        Passage(record.text("text"), record.optional_text("subject"))
        for record in read_records(path, "passage")
    ]


def pick_facts(facts: Sequence[Question], *, seed: int) -> list[Question]:
    """Samples facts with distinct subjects and answers, for one memory.

    Answers are compared without case, and "" is no subject.

    Args:
        facts: to sample from.
        seed: of the sampling, at least 0.

    Returns:
        A maximal selection, in the sampled order.

    Raises:
        ValueError: if seed is below 0.
    """
    require_all("facts", facts, Question)
    picked, subjects, answers = [], set(), set()
    for i in shuffled(seed, len(facts)):
        fact = facts[i]
        # A confusion of two facts with one answer would go unnoticed.
        answer = fact.answer.casefold()
        if fact.subject in subjects or answer in answers:
            continue
        picked.append(fact)
        subjects |= {fact.subject} - {""}
        answers.add(answer)
    return picked


def unrelated(passages: Sequence[Passage], fact: Question) -> list[Passage]:
    """The passages that name neither the fact's answer nor its subject, in any case.

    Answers are compared by whole words: "12" is not in "1912".

    Raises:
        ValueError: on anything else, by name.
    """
    require_all("passages", passages, Passage)
    require_instance("fact", fact, Question)
    answer = re.compile(rf"(?<![\w.,]){re.escape(fact.answer.casefold())}(?!\w)")
    subject = fact.subject.casefold()

    def silent(passage: Passage) -> bool:
        text = passage.text.casefold()
        return not answer.search(text) and not (subject and subject in text)

    return [passage for passage in passages if silent(passage)]
