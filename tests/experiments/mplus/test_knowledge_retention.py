"""Knowledge retention: its score, its file, and the program whole."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from experiments.mplus import answers as retention
from experiments.mplus import memories as methods
from experiments.mplus import models
from experiments.mplus.retention import (
    knowledge_retention,
    recorded,
    variants,
)
from experiments.mplus.retention.config import NAMES as METHODS
from experiments.mplus.retention.config import Config, Plain
from tests.experiments.mplus.facts import (
    BYTES,
    FACTS,
    MEMORY,
    PASSAGES,
    C,
    N,
    samples,
    tiny_backbone,
    tiny_memory,
)


class Notes:
    """Answers from the last tokens injected, if the question's sentence is there."""

    def __init__(self, tokens):
        self.tokens = tokens

    def kept(self, injected):
        return variants.KeptBytes(0, min(injected, self.tokens))

    def start(self, batch):
        return [""] * batch

    def inject(self, memory, tokens):
        rows = zip(memory, tokens, strict=True)
        return [(old + BYTES.decode(new))[-self.tokens :] for old, new in rows]

    def query(self, memory, prompt, count) -> Any:
        answers = []
        for text, question in zip(memory, map(BYTES.decode, prompt), strict=True):
            sentence = question.split("Answer: ")[1]
            _, found, rest = text.partition(sentence)
            answers.append(rest[:count].ljust(count) if found else "?" * count)
        return np.stack([BYTES.encode(answer) for answer in answers])


def marks(method, batches, after=(0, 1, 3), carry=False):
    """Of each of `after` a string, with a mark for each fact."""
    found = retention.query_batches(
        method, batches, BYTES, after=after, answer=N, carry=carry
    )
    return ["".join(parts) for parts in zip(*found, strict=True)]


def test_a_method_that_remembers_the_last_pieces_is_right_as_far():
    for pieces, expected in ((1, "200"), (2, "220"), (4, "222")):
        found = marks(Notes(pieces * C), samples())
        assert found == [mark * 4 for mark in expected]


def test_memory_goes_on_between_samples_only_if_it_is_carried():
    class Counting(Notes):
        started = 0

        def start(self, batch):
            self.started += 1
            return super().start(batch)

        def query(self, memory, prompt, count):
            lengths.append({len(text) for text in memory})
            return super().query(memory, prompt, count)

    for carry, starts, last in ((False, 2, 2 * C), (True, 1, 4 * C)):
        lengths = []
        method = Counting(10_000)
        marks(method, samples(), after=(1,), carry=carry)
        assert method.started == starts and lengths == [{2 * C}, {last}]


def test_full_attention_is_not_asked_beyond_its_positions():
    longest = 2 * C + 60
    method = methods.Full(tiny_backbone(), C, longest, 60)
    memory = method.start(1)
    tokens = np.zeros((1, C), np.int32)
    sizes = []
    for read in (1, 2, 3):
        memory = (None, memory[1] + C) if read > 2 else (memory[0], memory[1] + C)
        sizes.append(method.kept(read * C).device)
    assert method.query(memory, tokens, N) is None
    # A slot a token, and never more than there is room for.
    assert sizes[0] < sizes[1] == sizes[2]

    class Short(Notes):
        def query(self, memory, prompt, count):
            known = len(memory[0]) <= 2 * C
            return super().query(memory, prompt, count) if known else None

    assert marks(Short(10_000), samples(), after=(1, 2)) == ["2222", "----"]
    shares = retention.right("2-1-0")
    found = retention.accuracy(shares)
    assert found["questions"] == 3 and found["accuracy"] == pytest.approx(2 / 3)
    nothing = retention.accuracy(retention.right("--"))
    assert nothing["questions"] == 0 and math.isnan(nothing["accuracy"])
    assert (nothing["low"], nothing["high"]) == (0, 1)
    assert retention.gain(shares, retention.right("-----"), list("abcde")) is None


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)
def test_intervals_are_wilsons(hits, count, low, high):
    """Published values: Newcombe (1998), Table I, method 3, and its inverse."""
    found = retention.wilson(hits, count)
    np.testing.assert_allclose(found, (low, high), atol=5e-5)
    mirrored = retention.wilson(count - hits, count)
    np.testing.assert_allclose(mirrored, (1 - high, 1 - low), atol=5e-5)


def test_an_answer_counts_where_it_occurs():
    texts = [" 037.\n", "no 037", "037", " 37"]
    assert "".join(retention.mark("037", text) for text in texts) == "2120"


def test_a_gain_is_paired_by_fact_and_drawn_by_subject():
    ours, other = retention.right("221100"), retention.right("210000")
    each = retention.gain(ours, other, list("abcdef"))
    assert each is not None and each["mean"] == pytest.approx(2 / 6)
    # Both gains are of one subject: whether it is drawn is all that matters.
    one = retention.gain(ours, other, ["a", "b", "c", "c", "d", "e"])
    assert one is not None and one["mean"] == each["mean"]
    assert one["high"] - one["low"] > each["high"] - each["low"]
    # A draw in which no fact changes has no width.
    same = retention.gain(ours, ours, list("abcdef"))
    assert same == {"mean": 0, "low": 0, "high": 0}
    with pytest.raises(ValueError, match="must be of the same facts"):
        retention.gain(ours, other[:3], list("abcdef"))


def test_a_retriever_of_its_own_makes_a_row_of_its_own():
    row = {
        "method": "M+",
        "tuned": False,
        "seed": 42,
        "retriever": "fitted.safetensors",
    }
    assert recorded.row_name(row) == "M+, retriever fitted afterwards, seed 42"
    assert recorded.row_name(row | {"retriever": None}) == "M+, seed 42"
    assert recorded.row_name(
        row | {"retriever": None, "tuned": True, "seed": None}
    ) == ("M+, tuned")


@pytest.mark.slow
def test_the_program_goes_on_where_it_was(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(models, "load", lambda config: (tiny_memory(), BYTES, False))
    lines = [fact._asdict() for fact in FACTS]
    (tmp_path / "facts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    texts = [{"text": passage.text} for group in PASSAGES for passage in group]
    (tmp_path / "passages.jsonl").write_text("\n".join(map(json.dumps, texts)))
    config = Config(
        methods=("M+", "closed book"),
        samples=4,
        until=2,
        batch=2,
        after=(0, 2),
        chunk=C,
        answer=N,
        facts=tmp_path / "facts.jsonl",
        passages=tmp_path / "passages.jsonl",
        output=tmp_path / "result",
    )
    knowledge_retention.main(config)
    read = lambda: json.loads((tmp_path / "result.json").read_text())
    first = read()
    assert first["distances"] == [0, 2 * C] and len(first["facts"]) == 4
    assert [len(row["marks"][1]) for row in first["rows"].values()] == [2, 2]
    queried = []
    answered = methods.LatentMemory.query
    monkeypatch.setattr(
        methods.LatentMemory,
        "query",
        lambda self, memory, prompt, count: (
            queried.append(1) or answered(self, memory, prompt, count)
        ),
    )
    whole = dataclasses.replace(config, until=0)
    knowledge_retention.main(whole)
    # The second batch alone, at two distances.
    assert len(queried) == 2
    result = read()
    assert list(result["rows"]) == ["M+", "closed book"]
    for name, row in result["rows"].items():
        assert [len(part) for part in row["marks"]] == [4, 4] and row["commits"]
        assert row["marks"][0].startswith(first["rows"][name]["marks"][0])
        assert not row["recipe"] and len(row["kept_bytes"]) == 2
    assert result["rows"]["M+"]["memory"]["store"] == MEMORY.store_size
    shown = recorded.by_method(result)
    assert shown["closed book"]["gain"][0]["mean"] == pytest.approx(
        shown["M+"]["after"][0]["accuracy"]
        - shown["closed book"]["after"][0]["accuracy"]
    )
    assert shown["M+"]["gain"] == [None, None]
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")
    assert "most frequent answer" in capsys.readouterr().out
    with pytest.raises(ValueError, match="answer=7 must be that of the rows in"):
        knowledge_retention.main(dataclasses.replace(whole, answer=7))
    with pytest.raises(ValueError, match="samples=2 must be the 4 of"):
        knowledge_retention.main(dataclasses.replace(whole, samples=2))


def test_books_are_cut_into_passages():
    first, books = models.passages(Config())
    assert len(first) == 282 and len(books) > 500
    assert all(passage.text and not passage.subject for passage in books)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"samples": -1}, "samples must be at least 0, got -1"),
        ({"after": (2, 1)}, r"after must rise from 0 or more, got \(2, 1\)"),
        ({"after": (-1, 1)}, "after must rise from 0 or more"),
        ({"until": 6}, "until must be a multiple of batch=4, got 6"),
        ({"methods": ("LRU",)}, "methods must be one of"),
        ({"methods": ("MemoryLLM",)}, "memoryllm must be the folder"),
        ({"methods": ("M+",), "tuned": Path("x")}, "with tuned adapters, got"),
        ({"split": "train"}, "split must be one of"),
    ],
)
def test_bad_configs_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Config(**options)


def test_methods_that_need_a_trained_model_wait_for_one():
    plain = get_args(Plain)
    assert Config().chosen == plain
    assert Config(tuned=Path("t"), model=Path("m")).chosen == plain
    trained = Config(model=Path("m"))
    assert trained.chosen[0] == "M+" and "MemoryLLM" not in trained.chosen
    both = Config(model=Path("m"), memoryllm=Path("n"))
    assert set(both.chosen) == set(METHODS)
