"""Measurements: binned losses, stored scores, documents."""

import numpy as np
import pytest

from experiments.lab import measure
from memjax import evaluation
from memjax.data.documents.tokens import TokenisedDocument
from memjax.evaluation.statistics import loss_difference_by_document
from memjax.models.language_model.windowed import limit_attention
from tests import tiny

EDGES = [0, 5, 10, 20]


@pytest.fixture(scope="module", name="model")
def _model():
    return tiny.drawn(lambda: tiny.make_llama(num_layers=2))


def make_text(name, kind, tokens=21):
    drawn = np.random.default_rng(sum(name.encode()))
    ids = drawn.integers(0, tiny.LLAMA.vocab_size, tokens).astype(np.int32)
    return TokenisedDocument(name, kind, ids)


def test_binned_losses_compare_as_those_of_positions(model):
    texts = [make_text(f"{k}{i}", k) for k in ("proofs", "code") for i in range(5)]
    whole = [
        evaluation.token_losses(one, texts, tokens_per_call=20, batch_size=5)
        for one in (limit_attention(model, 2), model)
    ]
    binned = [
        measure.binned_losses(measure.bin_losses(one, EDGES), (1, 3)) for one in whole
    ]
    for one, parts in zip(whole, binned, strict=True):
        expected = evaluation.perplexity(one, kind="code", first=5)
        got = evaluation.perplexity(parts, kind="code")
        assert got == pytest.approx(expected, rel=1e-5)
        late = np.arange(20) >= 5
        one.nll[:] *= late
        one.mask[:] *= late
    got, expected = (loss_difference_by_document(*x) for x in (binned, whole))
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_texts_are_scored_once_each_at_their_own_length(model, tmp_path):
    texts = [make_text("a", "code", 11), make_text("b", "code")]
    calls = []

    def prepare():
        calls.append("prepared")
        return measure.score_text(model, 20)

    measure.score_once(prepare, texts[:1], tmp_path)
    found = measure.score_once(prepare, texts, tmp_path)
    again = measure.score_once(prepare, texts, tmp_path)
    assert calls == ["prepared"] * 2
    np.testing.assert_array_equal(found.losses.nll, again.losses.nll)
    assert again.seconds == found.seconds > 0
    assert found.losses.mask.sum(axis=1).tolist() == [10, 20]
    short, long = measure.bin_losses(found.losses, EDGES)
    assert short["targets"] == [5, 5, 0] and long["targets"] == [5, 5, 10]
    assert short["nats"][2] == 0 < long["nats"][2]
    expected = evaluation.token_losses(model, texts, tokens_per_call=20, batch_size=2)
    np.testing.assert_allclose(found.losses.nll, expected.nll, rtol=1e-5, atol=1e-6)


def test_documents_are_long_enough_and_enough_of_each_kind(tmp_path):
    for kind, size in (("proofs", 27), ("code", 27), ("prose", 12)):
        file = tmp_path / "corpus" / "test" / kind / "a.txt"
        file.parent.mkdir(parents=True)
        file.write_text("a" * size)

    def read(tokens, least, folder="corpus"):
        given = f"folder:{tmp_path}/{folder}", tiny.tokenizer(), "test", tokens, least
        return measure.documents_of_kinds(*given)

    found = [(x.kind, len(x.tokens)) for x in read(9, least=1)]
    assert found == [(kind, 10) for kind in measure.KINDS]
    with pytest.raises(ValueError, match="at least 2 documents of 'proofs' .* got 1"):
        read(9, least=2)
