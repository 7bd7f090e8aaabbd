"""Answers about injected text: asking, judging, intervals."""

import math
from typing import Any

import numpy as np
import pytest

from experiments.mplus import answers, methods
from tests.experiments.mplus.tiny import ANSWER, BYTES, CHUNK, samples


class Transcript:
    """Answers from the last tokens injected, if the question's sentence is there."""

    def __init__(self, tokens, positions=math.inf):
        self.tokens, self.positions = tokens, positions

    def state_bytes(self, injected):
        return methods.StateBytes(0, min(injected, self.tokens))

    def start(self, batch):
        return [""] * batch

    def inject(self, memory, tokens):
        rows = zip(memory, tokens, strict=True)
        return [(old + BYTES.decode(new))[-self.tokens :] for old, new in rows]

    def query(self, memory, prompt, count) -> Any:
        if len(memory[0]) > self.positions:
            return None
        found = []
        for text, question in zip(memory, map(BYTES.decode, prompt), strict=True):
            sentence = question.split("Answer: ")[1]
            _, known, rest = text.partition(sentence)
            found.append(rest[:count].ljust(count) if known else "?" * count)
        return np.stack([BYTES.encode(answer) for answer in found])


def marks(method, after=(0, 1, 3)):
    """Of each of `after` a string, with a mark for each fact."""
    given = {"after": after, "answer": ANSWER, "took": []}
    found = answers.query_batches(method, samples(), BYTES, **given)
    return ["".join(parts) for parts in zip(*found, strict=True)]


@pytest.mark.parametrize(("chunks", "expected"), [(1, "200"), (2, "220"), (4, "222")])
def test_facts_are_answered_as_far_as_the_memory_reaches(chunks, expected):
    assert marks(Transcript(chunks * CHUNK)) == [mark * 4 for mark in expected]


def test_facts_beyond_the_positions_are_not_counted():
    assert marks(Transcript(10_000, 2 * CHUNK), (1, 2)) == ["2222", "----"]
    shares = answers.right("2-1-0")
    found = answers.accuracy(shares)
    assert found["questions"] == 3 and found["accuracy"] == pytest.approx(2 / 3)
    nothing = answers.accuracy(answers.right("--"))
    assert nothing["questions"] == 0 and math.isnan(nothing["accuracy"])
    assert (nothing["low"], nothing["high"]) == (0, 1)
    assert answers.difference(shares, answers.right("-----"), list("abcde")) is None


def test_mark_tells_beginning_and_occurrence():
    texts = [" 037.\n", "no 037", "037", " 37"]
    assert "".join(answers.mark("037", text) for text in texts) == "2120"


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)
def test_intervals_are_wilsons(hits, count, low, high):
    """Published values: Newcombe (1998), Table I, method 3, and its inverse."""
    found = answers.wilson(hits, count)
    np.testing.assert_allclose(found, (low, high), atol=5e-5)
    mirrored = answers.wilson(count - hits, count)
    np.testing.assert_allclose(mirrored, (1 - high, 1 - low), atol=5e-5)


def test_difference_is_paired_by_fact_and_resampled_by_subject():
    ours, other = answers.right("221100"), answers.right("210000")
    each = answers.difference(ours, other, list("abcdef"))
    assert each is not None and each["mean"] == pytest.approx(2 / 6)
    # Both gains are of one subject: whether it is drawn is all that matters.
    one = answers.difference(ours, other, ["a", "b", "c", "c", "d", "e"])
    assert one is not None and one["mean"] == each["mean"]
    assert one["high"] - one["low"] > each["high"] - each["low"]
    same = answers.difference(ours, ours, list("abcdef"))
    assert same == {"mean": 0, "low": 0, "high": 0}


def row(method, marks, seed=None, **more):
    return {
        "method": method,
        "label": method,
        "tuned": False,
        "seed": seed,
        "recipe": [],
        "kept_bytes": [{"device": 1, "host": 0}],
        "marks": [marks],
    } | more


def test_seeds_of_a_row_are_joined_and_variants_are_not():
    rows = [
        row("M+", "2200", 1),
        row("M+", "200", 2),
        row("M+", "0000", 1, retriever="fitted"),
        row("BM25", "2222", tuned=True),
    ]
    result = {
        "facts": [{"subject": str(i)} for i in range(4)],
        "distances": [0],
        "rows": {str(i): x for i, x in enumerate(rows)},
    }
    joined = answers.by_method(result)
    assert [*joined] == ["M+", "M+, retriever fitted afterwards", "BM25, tuned"]
    ours = joined["M+"]
    assert ours["seeds"] == [1, 2] and ours["gain"] == [None]
    # Of the three facts that both seeds were asked.
    assert ours["after"][0]["questions"] == 3
    assert ours["after"][0]["accuracy"] == pytest.approx(0.5)
    assert joined["BM25, tuned"]["gain"][0]["mean"] == pytest.approx(-0.5)
