"""Answers: their loss is that of reading all at once, exact ones are generated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax import evaluation
from memjax.data import Question, QuestionInput, align
from memjax.mechanisms import AttentionConfig
from memjax.models import HMTConfig, LanguageModel, ModelConfig, add_hmt, generate
from memjax.models import Sampling as Draw
from tests import tiny

V, L = 11, 6


@functools.cache
def backbone():
    config = ModelConfig(
        mechanisms=(AttentionConfig(8, 2, 1, 4, capacity=48),),
        num_layers=1,
        vocab_size=V,
        model_dim=8,
        hidden_dim=8,
        dtype="float32",
        remat=False,
    )
    return tiny.drawn(lambda: LanguageModel(config, key=jax.random.key(0)))


@functools.cache
def searching():
    config = HMTConfig(segment_length=L, num_sensory_tokens=2, num_memories=4)
    model = add_hmt(backbone(), config, key=jax.random.key(1))
    # A search that chooses, so that what it has read ahead can be told.
    model.query.set_value(model.query.get_value() * 30)
    return model


ITEM = Question("c", "q", "a")


def entry(prompt, answer, seed=0):
    """An input of random tokens."""
    tokens = np.random.default_rng(seed).integers(0, V, prompt + answer)
    return QuestionInput(tokens.astype(np.int32), prompt, ITEM, 0, 1)


INPUTS = [entry(13, 2), entry(4, 3, 1), entry(20, 1, 2)]


@pytest.mark.slow
def test_losses_are_those_of_the_whole_text():
    scores = evaluation.score_answers(
        backbone(), INPUTS, tokens_per_call=5, batch_size=2
    )
    assert scores.mask.sum(axis=1).tolist() == [2, 3, 1]
    every = []
    for row, text in enumerate(INPUTS):
        given = backbone().init_state(1), jnp.asarray(text.tokens[None])
        _, logits = tiny.method(backbone(), "__call__", *given)
        logits = np.asarray(logits[0], np.float64)
        nll, likeliest = [], []
        for place in range(text.answer, len(text.tokens)):
            before, token = logits[place - 1], text.tokens[place]
            nll.append(np.log(np.exp(before).sum()) - before[token])
            likeliest.append(before.argmax() == token)
        np.testing.assert_allclose(scores.nll[row, : len(nll)], nll, atol=1e-5)
        assert scores.exact[row] == all(likeliest)
        every += nll
    assert np.all(scores.nll[scores.mask == 0] == 0)
    whole = evaluation.answer_perplexity(scores)
    assert whole == pytest.approx(np.exp(np.mean(every)))
    assert evaluation.answer_perplexity(scores, [2]) == pytest.approx(np.exp(every[-1]))
    assert np.isnan(evaluation.answer_perplexity(scores, []))


def test_greedy_continuation_is_an_exact_match():
    prompt = INPUTS[0].tokens[:13]
    state, key = backbone().init_state(1), jax.random.key(0)
    greedy = Draw(temperature=0.0)
    drawn = generate(backbone(), state, prompt[None], 3, key=key, sampling=greedy)
    right = np.concatenate([prompt, drawn.tokens[0]]).astype(np.int32)
    wrong = right.copy()
    wrong[-2] = (wrong[-2] + 1) % V
    texts = [INPUTS[0]._replace(tokens=tokens) for tokens in (right, wrong)]
    exact = evaluation.score_answers(
        backbone(), texts, tokens_per_call=8, batch_size=2
    ).exact
    assert exact.tolist() == [True, False]


def probability_of_any_answer(texts):
    """Of each text, the sum over all first tokens of an answer: 1 if none is seen.

    What follows the first token changes with it.
    """
    every = []
    for token in range(V):
        for text in texts:
            tokens = text.tokens.copy()
            tokens[text.answer :] = (tokens[text.answer :] + token) % V
            every.append(text._replace(tokens=tokens))
    scores = evaluation.score_answers(
        searching(), every, tokens_per_call=L, batch_size=len(every)
    )
    return np.exp(-scores.nll[:, 0]).reshape(V, len(texts)).sum(axis=0)


@pytest.mark.slow
def test_an_aligned_answer_is_not_read_ahead():
    # In the third segment, the first in which there is something to choose.
    texts = [entry(prompt, 3, prompt) for prompt in range(2 * L + 1, 3 * L + 1)]
    aligned = align(texts, L, searching().config.summary, np.zeros(L, np.int32))
    np.testing.assert_allclose(probability_of_any_answer(aligned), 1, atol=1e-5)
    apart = probability_of_any_answer(texts)
    assert np.abs(apart - 1).max() > 1e-4, "as they lie, some are read ahead"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(tokens_per_call=0), "tokens_per_call must be at least 1, got 0"),
        (dict(batch_size=0), "batch_size must be at least 1, got 0"),
        (dict(inputs=[]), "inputs must hold at least one"),
        (dict(inputs=[entry(0, 2)]), r"inputs\[0\]: the answer must begin inside"),
        (dict(inputs=[entry(4, 0)]), r"inputs\[0\]: the answer must begin inside"),
    ],
)
def test_unscorable_input_is_refused(change, message):
    options = dict(inputs=INPUTS, tokens_per_call=5, batch_size=2) | change
    with pytest.raises(ValueError, match=message):
        evaluation.score_answers(backbone(), options.pop("inputs"), **options)
