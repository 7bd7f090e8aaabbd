"""Questions with many contexts: groups, alignment, files."""

import json
import lzma
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memjax.data import (
    Question,
    align,
    load_facts,
    load_tokenizer,
    multi_context,
    read_questions,
)

BYTES = load_tokenizer("bytes")
PREAMBLE = np.full(64, 1, np.int32)


def item(number, subject=""):
    return Question(f"c{number}.", f"q{number}?", f"a{number}", "kind", subject)


@given(count=st.integers(1, 23), group=st.integers(1, 7))
def test_every_question_follows_the_contexts_of_its_group(count, group):
    items = [item(i) for i in range(count)]
    inputs = multi_context(items, group, BYTES)
    assert [entry.item for entry in inputs] == items
    for i, entry in enumerate(inputs):
        start = i // group * group
        members = items[start : start + group]
        text = " ".join(m.context for m in members) + f" {items[i].question}"
        assert BYTES.decode(entry.tokens[: entry.answer]) == text
        assert BYTES.decode(entry.tokens[entry.answer :]) == f" {items[i].answer}"
        assert (entry.place, entry.contexts) == (i - start, len(members))


@given(subjects=st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_no_group_has_two_items_of_one_subject(subjects):
    items = [item(i, subject) for i, subject in enumerate(subjects)]
    inputs = multi_context(items, 3, BYTES)
    assert Counter(entry.item for entry in inputs) == Counter(items)
    groups, start = [], 0
    while start < len(inputs):
        size = inputs[start].contexts
        groups.append([entry.item.subject for entry in inputs[start : start + size]])
        start += size
    assert all(len(set(group)) == len(group) for group in groups)


@given(prompt=st.integers(1, 40), answer=st.integers(1, 4), first=st.integers(0, 4))
def test_aligned_answers_are_after_the_tokens_read_ahead(prompt, answer, first):
    length = 8
    question = Question("x" * prompt, "q", "y" * (answer - 1) or "y", "", "")
    (entry,) = multi_context([question], 1, BYTES)
    size = len(entry.tokens) - entry.answer
    if size > length - first:
        with pytest.raises(ValueError, match="have room"):
            align([entry], length, first, PREAMBLE)
        return
    (moved,) = align([entry], length, first, PREAMBLE)
    added = moved.answer - entry.answer
    assert 0 <= added < length
    np.testing.assert_array_equal(moved.tokens[added:], entry.tokens)
    assert np.all(moved.tokens[:added] == 1)
    places = np.arange(moved.answer, len(moved.tokens))
    assert np.all(places % length >= first)
    assert len(set(places // length)) == 1


def test_shipped_questions_are_sound():
    items = load_facts()
    assert len(items) == 1774 and len({item.kind for item in items}) == 11
    for entry in items:
        # The fact is in the context, as the question begins it.
        fact = entry.question.split("Answer: ")[1]
        assert f"{fact} {entry.answer}" in entry.context
    assert len({item.subject for item in items}) > 150


@pytest.mark.parametrize("name", ["qa.jsonl", "qa.jsonl.xz"])
def test_lines_are_read(tmp_path, name):
    lines = [
        {"context": "c", "question": "q", "answer": "a", "more": 1},
        {"context": "d", "question": "r", "answer": "b", "kind": "k", "subject": "s"},
    ]
    data = "\n".join(json.dumps(line) for line in lines).encode()
    path = tmp_path / name
    path.write_bytes(lzma.compress(data) if name.endswith("xz") else data)
    assert read_questions(path) == [
        Question("c", "q", "a"),
        Question("d", "r", "b", "k", "s"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no question"),
        ("{", "line 1 is not JSON"),
        ("[]", "must be an object, got list"),
        ('{"context": "c", "question": "q"}', "'answer' must be a string .* got None"),
        ('{"context": "c", "question": " ", "answer": "a"}', "'question' must be"),
        (
            '{"context": "c", "question": "q", "answer": "a", "kind": 3}',
            "'kind' must be a string, got 3",
        ),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "qa.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_questions(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_questions(tmp_path / "absent.jsonl")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: multi_context([item(0)], 0, BYTES), "group must be at least 1"),
        (lambda e: multi_context([], 2, BYTES), "items must hold at least one"),
        (lambda e: align(e, 8, 8, PREAMBLE), r"first must be in \[0, segment\)"),
        (lambda e: align(e, 50, 45, PREAMBLE[:3]), "preamble must have .* got 3"),
    ],
)
def test_bad_tasks_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(multi_context([item(0)], 1, BYTES))
