"""Perplexity against a plain loop over tokens, and what may not leak."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memjax import evaluation
from memjax.data.documents.tokens import TokenisedDocument
from memjax.evaluation import TokenLosses
from memjax.mechanisms import ElasticMemoryConfig
from memjax.models import LanguageModel, ModelConfig
from tests import tiny

# The module, whose name in the package is a function's.
scoring = importlib.import_module("memjax.evaluation.losses")

V = 11
CONFIG = ModelConfig(
    mechanisms=(ElasticMemoryConfig(8, 2, 1, 4, block=4, order=4, decay=0.8),),
    num_layers=1,
    vocab_size=V,
    model_dim=8,
    hidden_dim=8,
    dtype="float32",
    remat=False,
)


def build():
    return tiny.drawn(lambda: LanguageModel(CONFIG, key=jax.random.key(0)))


MODEL = build()


def document(length, kind, seed):
    tokens = np.random.default_rng(seed).integers(0, V, length).astype(np.int32)
    return TokenisedDocument(f"{kind} {seed}", kind, tokens)


LONG, SHORT = document(23, "book", 0), document(12, "code", 1)
SINGLE = document(1, "note", 2)


@jax.jit
def step(state, token):
    return MODEL(state, token)


def token_by_token(tokens):
    """-log p of each token after the first, the state read one token at a time."""
    state, nll = MODEL.init_state(1), []
    for token, target in zip(tokens[:-1], tokens[1:], strict=True):
        state, logits = step(state, jnp.asarray([[token]], jnp.int32))
        scores = np.asarray(logits[0, 0], np.float64)
        nll.append(np.log(np.exp(scores).sum()) - scores[target])
    return np.array(nll)


def run(
    documents=(LONG, SHORT), tokens_per_call=5, batch_size=2, **options
) -> TokenLosses:
    return evaluation.token_losses(
        MODEL,
        documents,
        tokens_per_call=tokens_per_call,
        batch_size=batch_size,
        **options,
    )


@pytest.fixture(scope="module")
def whole():
    return run()


def test_each_loss_is_that_of_a_loop_over_tokens(whole):
    assert whole.nll.shape == whole.mask.shape == (2, 22)
    assert whole.kinds == ("book", "code")
    assert whole.mask.sum(axis=1).tolist() == [22, 11]
    for row, text in enumerate((LONG, SHORT)):
        count = len(text.tokens) - 1
        expected = token_by_token(text.tokens)
        np.testing.assert_allclose(whole.nll[row, :count], expected, atol=1e-5)
        assert np.all(whole.mask[row, :count] == 1)
        assert np.all(whole.nll[row, count:] == 0)


@pytest.mark.parametrize(
    "options", [dict(tokens_per_call=22), dict(batch_size=1), dict(batch_size=3)]
)
def test_losses_are_independent_of_segments_and_batches(whole, options):
    seen = []
    other = run(**options, progress=lambda *counts: seen.append(counts))
    # Targets of both texts, counted as they are scored.
    assert seen == sorted(seen) and seen[-1] == (33, 33)
    np.testing.assert_allclose(other.nll, whole.nll, atol=1e-5)
    np.testing.assert_array_equal(other.mask, whole.mask)


def test_equal_models_compile_one_program_whether_loaded_or_new(whole):
    """Parameters of a checkpoint are committed to a device, and a new state is not."""
    graph, params = nnx.split(build())
    loaded = nnx.merge(graph, jax.device_put(params, jax.devices()[0]))
    assert graph == nnx.graphdef(MODEL)
    before = scoring.score_segment._cache_size()
    found = evaluation.token_losses(
        loaded, [LONG, SHORT], tokens_per_call=5, batch_size=2
    )
    np.testing.assert_array_equal(found.nll, whole.nll)
    # Of committed arrays, for all of its five segments.
    assert scoring.score_segment._cache_size() <= before + 1


def test_a_later_token_never_changes_an_earlier_loss(whole):
    for at in (3, 9, 22):
        tokens = LONG.tokens[:].copy()
        tokens[at] = (tokens[at] + 1) % V
        nll = run([LONG._replace(tokens=tokens), SHORT]).nll
        # Token `at` is the target at position at - 1.
        np.testing.assert_array_equal(nll[0, : at - 1], whole.nll[0, : at - 1])
        np.testing.assert_array_equal(nll[1], whole.nll[1])
        assert np.all(nll[0, at - 1 :] != whole.nll[0, at - 1 :])


def test_cut_texts_are_read_with_an_empty_memory():
    cut = run(context_length=8)
    # 22 targets in texts of 8, 8 and 6; 11 in texts of 8 and 3.
    assert cut.mask.sum(axis=1).tolist() == [8, 8, 6, 8, 3]
    assert cut.kinds == ("book",) * 3 + ("code",) * 2
    assert cut.documents == (LONG.name,) * 3 + (SHORT.name,) * 2
    pieces = [LONG.tokens[0:9], LONG.tokens[8:17], LONG.tokens[16:23]]
    pieces += [SHORT.tokens[0:9], SHORT.tokens[8:12]]
    for row, piece in enumerate(pieces):
        expected = token_by_token(piece)
        np.testing.assert_allclose(cut.nll[row, : len(expected)], expected, atol=1e-5)


def test_text_of_one_token_has_no_target(whole):
    empty = SINGLE._replace(tokens=SINGLE.tokens[:0])
    np.testing.assert_array_equal(run([SINGLE, empty, LONG, SHORT]).nll, whole.nll)
    with pytest.raises(ValueError, match="none of the 1 documents has two tokens"):
        run([SINGLE])


def test_stopping_returns_what_was_read(whole):
    polls = iter([False, False, True])
    stopped = run(should_stop=lambda: next(polls))
    np.testing.assert_array_equal(stopped.nll[:, :10], whole.nll[:, :10])
    assert np.all(stopped.mask[:, :10] == whole.mask[:, :10])
    assert stopped.mask[:, 10:].sum() == 0 and stopped.kinds == whole.kinds


def test_parameters_are_read_from_the_model_at_each_call(whole):
    graph, params = nnx.split(MODEL)
    model: Any = nnx.merge(graph, jax.tree.map(lambda x: x * 1.1, params))
    other = evaluation.token_losses(
        model, [LONG, SHORT], tokens_per_call=5, batch_size=2
    )
    assert np.abs(other.nll - whole.nll).max() > 1e-3


HAND = TokenLosses(
    nll=np.array([[1, 2, 3, 4], [5, 6, 0, 0], [7, 0, 0, 0]], np.float32),
    mask=np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], np.float32),
    kinds=("book", "code", "book"),
    documents=("a", "b", "c"),
)


@pytest.mark.parametrize(
    "options,mean",
    [
        (dict(), 28 / 7),
        (dict(kind="book"), 17 / 5),
        (dict(kind="code"), 11 / 2),
        (dict(first=1), 15 / 4),
        (dict(kind="book", first=2), 7 / 2),
    ],
)
def test_perplexity_is_exp_of_the_mean_over_tokens(options, mean):
    assert evaluation.perplexity(HAND, **options) == pytest.approx(np.exp(mean))


def test_no_position_has_no_perplexity():
    assert np.isnan(evaluation.perplexity(HAND, kind="code", first=2))


def test_loss_by_position_bins_every_token_once():
    means = evaluation.loss_by_position(HAND, [0, 1, 3, 4, 9])
    assert means[:3] == pytest.approx([13 / 3, 11 / 3, 4])
    assert np.isnan(means[3])


@pytest.mark.parametrize(
    "longest,edges",
    [
        (100, [0, 16, 32, 64, 100]),
        (64, [0, 16, 32, 64]),
        (16, [0, 16]),
        (3, [0, 3]),
    ],
)
def test_log2_bins_double_and_end_at_the_longest(longest, edges):
    assert evaluation.log2_bins(longest) == edges


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(tokens_per_call=0), "tokens_per_call must be at least 1, got 0"),
        (dict(batch_size=0), "batch_size must be at least 1, got 0"),
        (dict(context_length=-1), "context_length must be at least 0, got"),
        (dict(documents=[]), "none of the 0 documents has two tokens"),
    ],
)
def test_unscorable_input_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        run(**options)
