"""Facts asked otherwise share no words with their sentence."""

import re

from experiments.mplus import asked
from memjax.data import load_facts

FACTS = load_facts()
#: Words without content.
COMMON = set(
    """a an and answer any as at before by can does else from in is it its live
more most of on one or over question the than to what where which who with""".split()
)


def content(text, but=""):
    """Stems of the content words, in which a plural is its singular."""
    words = re.findall("[a-z0-9]+", text.lower())
    left = set(words) - COMMON - set(re.findall("[a-z0-9]+", but.lower()))
    return {word.rstrip("s") for word in left}


def test_a_paraphrase_shares_the_country_alone():
    found = asked.ask_otherwise(FACTS, "in paraphrase")
    assert len(found) == len(FACTS)
    for fact, other in zip(FACTS, found, strict=True):
        assert fact.subject in other.question and other.context == fact.context
        stated = content(asked.sentence(fact, ""), fact.subject)
        assert not stated & content(other.question, fact.subject), other.question


def test_a_joined_question_needs_two_sentences():
    found = asked.ask_otherwise(FACTS, "joined")
    assert len(found) > 500
    for fact in found:
        assert fact.subject not in fact.question and fact.kind != asked.CODE
        (code,) = re.findall(r"callers reach by ([\d-]+)", fact.question)
        assert fact.context.endswith(f"telephone code of {fact.subject} is {code}.")
        assert fact.answer in fact.context


def test_a_superseded_fact_has_the_later_answer():
    found = asked.ask_otherwise(FACTS, "superseded")
    before = {fact.question: fact for fact in FACTS}
    assert len(found) > 1700
    for fact in found:
        old = before[fact.question]
        assert fact.context.startswith(old.context) and fact.answer not in old.context
        assert fact.context.endswith(asked.sentence(old, fact.answer))
