"""Layers windowed in turn: losses are those of models with these layers."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from experiments.memories import layers
from experiments.memories.documents import documents
from memjax import evaluation
from memjax.data.documents.tokens import TokenisedDocument
from memjax.models.language_model.rebuilt import replace_config
from memjax.models.language_model.windowed import limit_attention
from tests import tiny

CONFIG = layers.Config(
    backbone="tiny", window=4, sinks=2, tokens=20, least=1, candidates=2, picks=2
)


def _text(name, kind):
    tokens = np.random.default_rng(len(name)).integers(0, tiny.LLAMA.vocab_size, 21)
    return TokenisedDocument(name, kind, tokens.astype(np.int32))


@pytest.fixture(scope="module")
def model():
    return tiny.drawn(lambda: tiny.make_llama(num_layers=2))


def _loss(model, text):
    found = evaluation.token_losses(model, [text], segment=20, batch_size=1)
    return found.nll[0, CONFIG.first :].mean()


def test_flipped_layers_are_the_models_with_these_layers(model):
    text = _text("a", "proofs")
    full, window = model.config.layers[0], limit_attention(model, 4, 2).config.layers[0]
    base, flipped = layers.Layers(model, CONFIG).flipped(text, (True, False), [0, 1])
    mixed = [
        replace_config(model, mechanisms=mechanisms)
        for mechanisms in ((full, window), (window, window), (full, full))
    ]
    expected = [_loss(one, text) for one in mixed]
    np.testing.assert_allclose([base, *flipped], expected, rtol=1e-5)
    assert len({round(x, 4) for x in expected}) == 3


def test_greedy_choice_ends_at_full_attention(model):
    texts = [_text("a", "proofs"), _text("bb", "code"), _text("ccc", "prose")]
    *_, found = layers.measure(layers.Layers(model, CONFIG), texts, CONFIG)
    assert sorted(pick["layer"] for pick in found["greedy"]) == [0, 1]
    best = max(range(2), key=lambda i: found["brought_back"][i]["all"]["nats"])
    assert found["greedy"][0]["layer"] == best
    last = found["greedy"][-1]
    np.testing.assert_allclose(
        list(last["perplexity"].values()), list(found["perplexity_full"].values())
    )
    assert last["brought_back"]["all"] == pytest.approx(found["rise_of_all"]["all"])


def test_plot(tmp_path):
    rows = [{kind: {"nats": 0.1} for kind in layers.KINDS}] * 2
    result = {"rise": rows, "brought_back": rows}
    layers.plot(result, tmp_path / "whole.png")
    # Of a program that was stopped.
    layers.plot({"rise": rows}, tmp_path / "part.png")
    sizes = [(tmp_path / f"{name}.png").stat().st_size for name in ("whole", "part")]
    assert sizes[0] > sizes[1] > 1000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 6}, r"tokens must be more than window \+ sinks = 6, got 6"),
        ({"picks": 3}, "picks must be at most candidates=2, got 3"),
    ],
)
def test_bad_sizes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_too_few_documents_are_refused(tmp_path):
    for kind, text in (("proofs", "abc" * 9), ("code", "abc" * 9), ("prose", "ab")):
        file = tmp_path / "corpus" / "test" / kind / "a.txt"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    source = f"folder:{tmp_path}/corpus"
    found = documents(source, tiny.tokenizer(), "test", 9, kinds=("code",), least=1)
    assert [len(x.tokens) for x in found] == [10]
    more: Any = dict(kinds=("code", "proofs"), least=1, long=1, longest=20)
    found = documents(source, tiny.tokenizer(), "test", 9, **more)
    assert [(x.kind, len(x.tokens)) for x in found] == [("code", 21), ("proofs", 21)]
    with pytest.raises(ValueError, match="1 documents of 'code' .* 27 tokens"):
        documents(source, tiny.tokenizer(), "test", 9, **(more | {"longest": 27}))
    message = "at least 1 documents of 'prose' with more than 9 tokens .* got 0"
    with pytest.raises(ValueError, match=message):
        documents(source, tiny.tokenizer(), "test", 9, least=1)
