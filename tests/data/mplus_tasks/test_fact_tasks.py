"""Fact tasks: statements, questions, and the split of subjects."""

import dataclasses

import numpy as np
import pytest

from memjax.data import TokenisedDocument, load_facts, load_tokenizer
from memjax.data.batches.sampling import StepRandom
from memjax.data.mplus_tasks.fact_tasks import FactTexts, split_facts
from memjax.data.mplus_tasks.task_batches import TaskBatches
from memjax.data.mplus_tasks.tasks import MPlusTaskConfig

BYTES = load_tokenizer("bytes")
FACTS = load_facts()
CHUNK, TARGET = 700, 300
TEXTS = FactTexts(FACTS, BYTES, CHUNK, TARGET)
CONFIG = MPlusTaskConfig(
    chunks=(1, 2), shortest_chunk=600, target=TARGET, prompt=9, ask=0.5, repeat=0.0
)
BOOK = TokenisedDocument("book", "prose", np.full(60_000, ord("z"), np.int32))


def task_batches(config=CONFIG, facts=TEXTS, **options):
    return TaskBatches(
        [BOOK], config, CHUNK, 2, 1, BYTES.encode("Repeat:"), facts=facts, **options
    )


def rows(count, lengths=(650,)):
    for step in range(count):
        chunks, target = TEXTS.batch_element(StepRandom(7, step), lengths)
        pieces = zip(chunks, lengths, strict=True)
        yield [BYTES.decode(piece[:n]) for piece, n in pieces], target


def asked(target):
    """The questions with the answers that are scored, in the order of the target."""
    text = BYTES.decode(target.tokens)
    scored = np.flatnonzero(target.mask)
    runs = np.split(scored, np.flatnonzero(np.diff(scored) > 1) + 1)
    for run in runs:
        answer = BYTES.decode(target.targets[run])
        yield text[: run[0] + 1].rpartition("\n\n")[2], answer


def test_every_answer_is_stated_and_only_answers_are_scored():
    for chunks, target in rows(40):
        found = list(asked(target))
        assert found and target.mask.sum() == sum(len(answer) for _, answer in found)
        for question, answer in found:
            begun = question.rpartition("\nAnswer: ")[2]
            assert f"{begun}{answer}." in chunks[0]


def test_answers_are_sampled_from_all_subjects():
    true = {(fact.question, f" {fact.answer}") for fact in FACTS}
    found = [pair for _, target in rows(60) for pair in asked(target)]
    assert sum(pair in true for pair in found) < 0.2 * len(found)
    answers = {}
    for question, answer in found:
        answers.setdefault(question, set()).add(answer)
    assert max(map(len, answers.values())) > 1


def test_row_states_facts_of_one_subject_in_all_chunks():
    both = 0
    for chunks, target in rows(40, (600, 700)):
        begins = [q.rpartition("\nAnswer: ")[2] for q, _ in asked(target)]
        subjects = {
            fact.subject for fact in FACTS if fact.question[-20:] in str(begins)
        }
        assert subjects
        where = [{i for i, c in enumerate(chunks) if f"{b} " in c} for b in begins]
        both += len(set().union(*where)) == 2
    assert both > 10


def test_targets_are_shifted_by_one_and_end_with_a_whole_answer():
    for _, target in rows(20):
        np.testing.assert_array_equal(target.tokens[1:], target.targets[:-1])
        last = np.flatnonzero(target.mask)[-1]
        assert not target.targets[last + 1 :].any()


def test_subjects_are_either_trained_on_or_tested():
    train, test = split_facts(FACTS, seed=0)
    assert len(train) + len(test) == len(FACTS) and min(len(train), len(test)) > 800
    assert not {f.subject for f in train} & {f.subject for f in test}
    assert split_facts(FACTS, seed=1)[0] != train


def test_the_share_of_steps_with_facts_is_as_configured():
    told = read = 0
    for assignment, _ in zip(task_batches(), range(200), strict=False):
        if assignment.batch.chunks.shape[1]:
            facts = bool((assignment.batch.chunks != ord("z")).any(axis=2).all())
            facts = facts and b"Question" in bytes(
                assignment.batch.target.tokens[0].astype(np.uint8)
            )
            told, read = told + facts, read + (not facts)
    assert 0.35 < told / (told + read) < 0.65


def test_stream_resumes_on_any_number_of_hosts():
    whole = task_batches()
    for _ in range(5):
        next(whole)
    position = whole.get_state()
    expected = [next(whole) for _ in range(6)]
    again = task_batches()
    again.set_state(position)
    for host in range(2):
        part = task_batches(shard_index=host, shard_count=2)
        part.set_state(position)
        for one, other in zip(expected, (next(part) for _ in range(6)), strict=True):
            np.testing.assert_array_equal(one.batch.chunks[host], other.batch.chunks[0])
    for one in expected:
        np.testing.assert_array_equal(one.batch.chunks, next(again).batch.chunks)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(facts=None), "facts must be given where ask > 0"),
        (dict(config=dataclasses.replace(CONFIG, ask=0.0)), "only there, got ask=0.0"),
    ],
)
def test_facts_are_required_with_ask(change, message):
    with pytest.raises(ValueError, match=message):
        task_batches(**change)


def test_facts_that_are_no_clozes_are_refused():
    with pytest.raises(ValueError, match="facts must be clozes"):
        FactTexts([FACTS[0]._replace(question="What?")], BYTES, CHUNK, TARGET)
    with pytest.raises(ValueError, match="facts must be at least one, got none"):
        FactTexts([], BYTES, CHUNK, TARGET)
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        split_facts(FACTS, seed=-1)
    with pytest.raises(ValueError, match="ask must be in"):
        dataclasses.replace(CONFIG, ask=2.0)
