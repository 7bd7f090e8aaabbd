"""Facts asked without their words: in paraphrase, joined with another, or superseded.

A fact is a sentence of its context, such as "The capital of Algeria is Algiers."
Questions in paraphrase, one a relation in `asked.txt`, have no content word of it but
the country's name. A joined question tells the country by its telephone code, which
another sentence of the context has. A superseded fact is stated again behind its
context with another country's answer, which is then the right one.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from memjax.data import Question

Asked = Literal["as stated", "in paraphrase", "joined", "superseded"]
_LINES = Path(__file__).with_suffix(".txt").read_text("utf-8").splitlines()
#: Questions and beginnings of their answers, by relation.
WORDINGS = dict(line.split(": ", 1) for line in _LINES)
CODE = "dial_code"


def ask_otherwise(facts: Sequence[Question], asked: Asked) -> list[Question]:
    """The same facts asked in one of these ways; those that cannot be are left out."""
    if asked == "as stated":
        return list(facts)
    codes = {fact.subject: fact for fact in facts if fact.kind == CODE}
    found = []
    for i, fact in enumerate(facts):
        if asked == "superseded":
            others = (*facts[i + 1 :], *facts[:i])
            new = [x.answer for x in others if x.kind == fact.kind]
            new = [x for x in new if x not in fact.context]
            if new:
                changed = f"{fact.context} This has changed. {sentence(fact, new[0])}"
                found.append(fact._replace(context=changed, answer=new[0]))
        elif asked == "in paraphrase":
            found.append(_paraphrase(fact, fact.subject))
        elif fact.kind != CODE and (code := codes.get(fact.subject)):
            context = f"{fact.context} {sentence(code, code.answer)}"
            country = f"the country that callers reach by {code.answer}"
            found.append(_paraphrase(fact._replace(context=context), country))
    return found


def sentence(fact: Question, answer: str) -> str:
    """The sentence that states a fact, with an answer."""
    return f"{fact.question.split('Answer: ')[-1]} {answer}."


def _paraphrase(fact: Question, country: str) -> Question:
    question, answer = WORDINGS[fact.kind].format(country).split("|")
    return fact._replace(question=f"Question: {question}\nAnswer: {answer}")
