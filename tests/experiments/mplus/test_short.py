"""Short texts with a memory: answers' score, what is injected, the program whole."""

import functools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.mplus import scores, short
from memjax.data import Question, load_tokenizer, load_tokens
from memjax.mechanisms import AttentionConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.mplus.build import mplus
from memjax.models.mplus.config import MPlusConfig
from tests.tiny import method

BYTES = load_tokenizer("bytes")
C = 16
CONFIG = ModelConfig(
    mechanisms=(AttentionConfig(16, 2, 1, 8, capacity=256),),
    num_layers=1,
    vocab_size=256,
    model_dim=16,
    hidden_dim=16,
    dtype="float32",
    remat=False,
)
MEMORY = MPlusConfig(
    tokens=8, pool=16, chunk=C, retrieved=8, store=64, key_dim=4, rank=2
)


@functools.cache
def tiny_backbone():
    return LanguageModel(CONFIG, key=jax.random.key(0))


@functools.cache
def trained_memory():
    model = mplus(tiny_backbone(), MEMORY, key=jax.random.key(1))
    model.read_adapter = nnx.data(jax.tree.map(lambda x: x + 0.1, model.read_adapter))
    return model


FACTS = [
    Question("", f"{'Where' if i % 2 else 'How many'} {i}?", answer, kind, f"s{i}")
    for i, (answer, kind) in enumerate(
        zip(
            ["12", "Rome", "345", "Oslo", "7", "Lima", "89", "rome"],
            ["count", "place"] * 4,
            strict=True,
        )
    )
]


@pytest.fixture(name="facts", scope="module")
def _facts(tmp_path_factory):
    file = tmp_path_factory.mktemp("facts") / "facts.jsonl"
    lines = [fact._asdict() | {"context": "-"} for fact in FACTS]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def config(facts, **changes):
    sizes: dict[str, Any] = dict(
        texts=4, batch=2, tokens=20, prompt=4, questions=9, choices=3
    )
    return short.Config(facts=facts, **sizes | changes)


def test_choices_are_answers_to_questions_of_the_same_kind(facts):
    drawn = short.cloze(config(facts), BYTES)
    assert drawn is not None
    # "rome" is "Rome" again: one of them is queried.
    assert len(drawn.facts) == 7 and drawn.tokens.shape[:2] == (7, 3)
    assert drawn.prompt == len("\n\nWhere 1?")
    for fact, tokens, answer in zip(*drawn[:3], strict=True):
        question = f"\n\n{fact.question}"
        given = [
            BYTES.decode(row[mask]) for row, mask in zip(tokens, answer, strict=True)
        ]
        assert given[0] == f" {fact.answer}"
        folded = [text.strip().casefold() for text in given]
        kind = {x.answer.casefold() for x in FACTS if x.kind == fact.kind}
        assert len({*folded}) == 3 and {*folded} <= kind
        for row, mask, text in zip(tokens, answer, given, strict=True):
            whole = BYTES.decode(row[: len(question) + len(text)])
            assert whole == question + text and mask.sum() == len(text)
            assert not row[len(whole) :].any()
    fewer = short.cloze(config(facts, questions=2), BYTES)
    assert fewer is not None and fewer.facts == drawn.facts[:2]
    assert short.cloze(config(facts, questions=0), BYTES) is None
    with pytest.raises(ValueError, match="choices must be at most the answers of some"):
        short.cloze(config(facts, choices=5), BYTES)


def test_the_likeliest_answer_counts(facts):
    drawn = short.cloze(config(facts), BYTES)
    assert drawn is not None
    right = {f" {fact.answer}" for fact in drawn.facts[:3]}

    def losses(tokens, prompt):
        """1 a token, and 0.9 where the text ends with one of the answers."""
        nats = np.ones((len(tokens), tokens.shape[1] - prompt), np.float32)
        for row, ids in enumerate(tokens):
            text = BYTES.decode(ids).rstrip("\0")
            if any(text.endswith(f"?{answer}") for answer in right):
                nats[row] *= 0.9
        return nats

    found = short.choose(config(facts), drawn, losses)
    by_mean, by_sum = [], []
    for tokens, answer in zip(drawn.tokens, drawn.answer, strict=True):
        given = [
            BYTES.decode(row[mask]) for row, mask in zip(tokens, answer, strict=True)
        ]
        means = [0.9 if text in right else 1.0 for text in given]
        sums = [len(text) * mean for text, mean in zip(given, means, strict=True)]
        by_mean.append(means[0] < min(means[1:]))
        by_sum.append(sums[0] < min(sums[1:]))
    assert found["right_by_mean"].tolist() == by_mean and any(by_mean)
    assert found["right"].tolist() == by_sum and by_mean != by_sum
    # Where all are alike none is the likeliest.
    flat = lambda tokens, prompt: np.ones((2, tokens.shape[1] - prompt), np.float32)
    found = short.choose(config(facts), drawn, flat)
    assert not found["right_by_mean"].any()


@pytest.fixture(name="texts", scope="module")
def _texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for split in ("validation", "test"):
        (folder / split).mkdir()
        for i in range(2):
            (folder / split / f"{i}.txt").write_text(f"{split} {i} window state " * 9)
    return f"folder:{folder}"


@pytest.mark.slow
def test_the_program_runs_whole(monkeypatch, tmp_path, texts, facts, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(short, "recipe", lambda folder: [{"seed": folder.name}])
    monkeypatch.setattr(
        scores, "load_trained", lambda name, folder: (trained_memory(), BYTES)
    )
    given = config(
        facts, model=tmp_path / "run", source=texts, output=tmp_path / "result"
    )
    short.main(given)
    report = json.loads((tmp_path / "result.json").read_text())
    assert report["recipe"] == [{"seed": "run"}]
    models = report["models"]
    assert [*models] == [
        "backbone",
        "M+, empty memory",
        "M+, full of other text",
        "M+, untrained, empty memory",
        "M+, untrained, full of other text",
    ]
    assert report["questions"] == 7 and report["chance"] == 1 / 3
    nats = {name: np.asarray(row["nats_by_text"]) for name, row in models.items()}
    # With an empty memory, only an adapter that was trained changes anything.
    fresh = "M+, untrained, empty memory"
    np.testing.assert_allclose(nats[fresh], nats["backbone"], atol=1e-5)
    assert models[fresh]["right"]["lost"]["mean"] == 0
    assert abs(models["M+, empty memory"]["nats_lost"]["mean"]) > 1e-3
    pairs = zip(nats["M+, empty memory"], nats["M+, full of other text"], strict=True)
    assert all(a != b for a, b in pairs)
    documents = load_tokens(texts, BYTES, "test")
    found = [x.tokens for x in scores.excerpts(documents, 4, 20)]
    tokens = np.stack(found)
    state = tiny_backbone().init_state(4)
    _, logits = method(tiny_backbone(), "__call__", state, jnp.asarray(tokens[:, :-1]))
    right = np.take_along_axis(np.asarray(logits), tokens[:, 1:, None], axis=2)[..., 0]
    every = np.asarray(jax.nn.logsumexp(logits, axis=-1)) - right
    np.testing.assert_allclose(nats["backbone"], every[:, 3:].mean(axis=1), atol=1e-5)
    base, full = models["backbone"], models["M+, full of other text"]
    assert base["perplexity"] == pytest.approx(math.exp(every[:, 3:].mean()), rel=1e-4)
    lost = (nats["M+, full of other text"] - nats["backbone"]).mean()
    assert full["nats_lost"]["mean"] == pytest.approx(lost) and lost != 0
    assert full["perplexity_change"] == pytest.approx(
        full["perplexity"] / base["perplexity"] - 1
    )
    assert base["right"]["low"] <= base["right"]["accuracy"] <= base["right"]["high"]
    assert "right by chance: 0.33" in capsys.readouterr().out


def test_a_full_memory_is_of_other_documents(monkeypatch, tmp_path, texts, facts):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    injected = []

    class Notes:
        def __init__(self, model):
            pass

        def start(self, batch):
            return batch

        def inject(self, memory, tokens):
            injected.append(tokens)
            return memory

    monkeypatch.setattr(short.methods, "LatentMemory", Notes)
    given = config(facts, source=texts)
    short.inject(given, trained_memory(), 3, BYTES)
    rows = [BYTES.decode(row) for row in np.concatenate(injected, axis=1)]
    for i, row in enumerate(rows):
        assert len(row) == 3 * C and f"validation {i}" in row and "test" not in row


def test_settings_that_cannot_be_are_refused():
    cases: list[tuple[dict[str, Any], str]] = [
        ({"texts": 3}, "texts must be a multiple of batch=4, got 3"),
        ({"prompt": 0}, "prompt must be at least 1, got 0"),
        ({"tokens": 32}, "tokens must be more than prompt=32, got 32"),
        ({"choices": 1}, "choices must be at least 2, got 1"),
        ({"told": -1}, "told must be at least 0, got -1"),
    ]
    for changes, message in cases:
        with pytest.raises(ValueError, match=message):
            short.Config(**changes)
