"""Samples of knowledge retention: what is injected, and which facts are drawn."""

import numpy as np
import pytest

from experiments.mplus.samples import choose_facts, in_rounds
from tests.experiments.mplus.tiny import BYTES, CHUNK, FACTS, NAMES, samples


def test_samples_are_context_other_text_and_question():
    batches = samples()
    assert len(batches) == 2
    injected = [fact for batch in batches for fact in batch.facts]
    assert len(set(injected)) == 4
    for batch in batches:
        assert batch.context.shape == (2, CHUNK) and batch.chunks.shape == (3, 2, CHUNK)
        for row, fact in enumerate(batch.facts):
            assert BYTES.decode(batch.prompts[row]) == f"\n\n{fact.question}"
            context = BYTES.decode(batch.context[row])
            assert context.endswith(f"\n\n{fact.context}")
            other = BYTES.decode(batch.chunks[:, row].ravel())
            assert other.startswith("\n\n") and fact.subject not in other
            first = [part[0] for part in other.split("\n\n") if part]
            assert len(set(first)) == len(first) and "z" not in first
    firsts = {BYTES.decode(b.chunks[0, r])[2] for b in batches for r in range(2)}
    assert len(firsts) > 1
    same = samples()
    np.testing.assert_array_equal(same[1].chunks, batches[1].chunks)


def test_second_group_of_passages_follows_the_first():
    batch, *_ = samples(num_chunks=9)
    for row, fact in enumerate(batch.facts):
        text = BYTES.decode(batch.chunks[:, row].ravel())
        assert text.index("z") == (8 - (fact.subject in NAMES[:8])) * 42 + 2
        assert BYTES.decode(batch.context[row]).startswith("z")


def test_batches_have_questions_of_one_length_and_lengths_can_be_few():
    facts = [
        fact._replace(question="?" * (i % 3 // 2) + fact.question)
        for i, fact in enumerate(FACTS)
    ]

    def lengths(samples, few):
        chosen = choose_facts(facts, BYTES, samples=samples, batch=2, lengths=few)
        found = [len(fact.question) for fact in chosen]
        assert found[::2] == found[1::2]
        return {*found}

    assert lengths(8, 0) == {45, 46} and lengths(6, 1) == {45}


def test_facts_known_without_context_are_not_queried():
    known, answers = NAMES[2:5], {fact.question: fact.answer for fact in FACTS}

    def answer(prompts):
        assert prompts.shape[0] == 2
        questions = [BYTES.decode(prompt)[2:] for prompt in prompts]
        return [
            f"It is {answers[q]}!" if any(name in q for name in known) else "?"
            for q in questions
        ]

    batches = samples(samples=6, answer_closed_book=answer)
    subjects = [fact.subject for batch in batches for fact in batch.facts]
    assert len(subjects) == 6 and not {*subjects} & {*known}
    with pytest.raises(ValueError, match="samples must be at most 6 of these"):
        samples(samples=8, answer_closed_book=answer)


def test_facts_of_one_subject_return_once_all_others_were_drawn():
    twice = [
        fact._replace(question=f"{q}{fact.question}") for fact in FACTS for q in "ab"
    ]
    drawn = in_rounds(twice)
    assert sorted(drawn) == sorted(twice)
    assert len({fact.subject for fact in drawn[:10]}) == 10
