"""Shipped facts, their sampling, and unrelated passages."""

import json
import lzma

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memjax.data import (
    Passage,
    Question,
    load_facts,
    load_passages,
    pick_facts,
    read_passages,
    unrelated,
)

FACTS = load_facts()
PASSAGES = load_passages()


def fact(answer, subject=""):
    return Question("c", "q", answer, "kind", subject)


def test_shipped_facts_are_clozes():
    assert len(FACTS) == 1774 and len({entry.subject for entry in FACTS}) == 217
    for entry in FACTS:
        question, cloze = entry.question.split("\nAnswer: ")
        assert question.startswith("Question: ") and question.endswith("?")
        assert entry.context.count(f"{cloze} {entry.answer}") == 1
        assert entry.subject in question


@pytest.mark.slow
def test_shipped_passages_suffice_for_every_fact():
    assert len(PASSAGES) == 282
    assert all(800 < len(passage.text) < 3500 for passage in PASSAGES)
    # A few are looked at: all take a while.
    counts = [len(unrelated(PASSAGES, entry)) for entry in FACTS[::25]]
    assert min(counts) >= 180 and max(counts) < 282


def test_picked_facts_have_distinct_subjects_and_answers():
    picked = pick_facts(FACTS, seed=0)
    assert len(picked) > 180 and set(picked) <= set(FACTS)
    assert len({entry.subject for entry in picked}) == len(picked)
    assert len({entry.answer.casefold() for entry in picked}) == len(picked)
    assert len({entry.kind for entry in picked[:40]}) == 11
    assert pick_facts(FACTS, seed=0) == picked != pick_facts(FACTS, seed=1)


@given(
    pairs=st.lists(st.tuples(st.sampled_from("abAB"), st.sampled_from(["", "x", "y"])))
)
def test_pick_is_maximal(pairs):
    facts = [fact(answer, subject) for answer, subject in pairs]
    picked = pick_facts(facts, seed=3)
    answers = {entry.answer.casefold() for entry in picked}
    subjects = {entry.subject for entry in picked} - {""}
    assert len(answers) == len(picked)
    for entry in facts:
        assert entry.answer.casefold() in answers or entry.subject in subjects


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("Nothing at all.", True),
        ("The LION sleeps.", False),
        ("A lioness is another.", True),
        ("sealion", True),
        ("In peru, it rains.", False),
    ],
)
def test_passages_that_name_answer_or_subject_are_left_out(text, kept):
    passage = Passage(text)
    found = unrelated([passage], fact("lion", "Peru"))
    assert found == [passage] * kept


def test_number_inside_another_is_no_answer():
    passages = [Passage("in 1912"), Passage("3.12 per cent"), Passage("about 12 km")]
    assert unrelated(passages, fact("12")) == passages[:2]


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.xz"])
def test_passages_are_read(tmp_path, name):
    lines = [{"text": "one", "more": 1}, {"text": "two", "subject": "s"}]
    data = "\n\n".join(map(json.dumps, lines)).encode()
    path = tmp_path / name
    path.write_bytes(lzma.compress(data) if name.endswith("xz") else data)
    assert read_passages(path) == [Passage("one"), Passage("two", "s")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no passage"),
        (b'\n{"text": 3}', "line 2: 'text' must be a string .* got 3"),
        (b'{"text": "a", "subject": []}', "'subject' must be a string"),
        (b"[" * 100_000, "line 1 is not JSON"),
        (b"\xff", "cannot be read"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_passages(path)


def test_a_seed_below_zero_is_refused():
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        pick_facts(FACTS, seed=-1)
