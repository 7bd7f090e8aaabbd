"""Generation: prefill in pieces, decode on the same state, draw by the rules."""

import functools
import importlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memjax.mechanisms import AttentionConfig, ElasticMemoryConfig
from memjax.models import LanguageModel, ModelConfig, Sampling, generate

draw = importlib.import_module("memjax.models.generate").draw

B, P, NEW, V = 2, 9, 6, 17
CONFIG = ModelConfig(
    mixers=(
        ElasticMemoryConfig(8, 2, 1, 4, block=4, order=4, decay=0.8),
        AttentionConfig(8, 2, 1, 4, capacity=P + NEW),
    ),
    num_layers=2,
    vocab_size=V,
    model_dim=8,
    hidden_dim=16,
    dtype="float32",
    remat=False,
)


@functools.cache
def tiny():
    return LanguageModel(CONFIG, key=jax.random.key(0))


PROMPT = np.random.default_rng(0).integers(0, V, (B, P))
GREEDY = Sampling(temperature=0.0)


@functools.cache
def graph_and_params():
    return nnx.split(tiny())


@jax.jit
def forward(tokens):
    graph, params = graph_and_params()
    model = nnx.merge(graph, params)
    return model(model.init_state(B), tokens)


def go(count=NEW, prompt=PROMPT, sampling=GREEDY, seed=0, state=None, segment=1024):
    state = tiny().init_state(B) if state is None else state
    key = jax.random.key(seed)
    return generate(
        tiny(), state, prompt, count, key=key, sampling=sampling, segment=segment
    )


@pytest.fixture(scope="module")
def greedy():
    return go()


def test_greedy_is_the_likeliest_token_of_the_whole_text_each_time(greedy):
    state, tokens = greedy
    text = np.concatenate([PROMPT, tokens[:, :-1]], axis=1)
    after, logits = forward(jnp.asarray(text, jnp.int32))
    np.testing.assert_array_equal(tokens, np.argmax(logits[:, P - 1 :], axis=-1))
    # All tokens but the last drawn have been read, and nothing grew.
    chex.assert_trees_all_close(state, after, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, tiny().init_state(B))


@pytest.mark.parametrize("segment", [3, 4])
def test_the_prompt_may_be_read_in_any_pieces(greedy, segment):
    state, tokens = go(segment=segment)
    np.testing.assert_array_equal(tokens, greedy[1])
    chex.assert_trees_all_close(state, greedy[0], rtol=1e-5, atol=1e-5)


def test_the_returned_state_goes_on(greedy):
    state, first = go(count=3)
    # Its last token has been drawn and not read.
    _, second = go(count=3, prompt=first[:, -1:], state=state)
    np.testing.assert_array_equal(np.concatenate([first, second], 1), greedy[1])


def test_one_candidate_is_greedy(greedy):
    _, tokens = go(sampling=Sampling(temperature=0.7, top_k=1))
    np.testing.assert_array_equal(tokens, greedy[1])


def test_the_key_decides(greedy):
    hot = Sampling(temperature=3.0)
    once, again, other = (go(sampling=hot, seed=seed)[1] for seed in (1, 1, 2))
    np.testing.assert_array_equal(once, again)
    assert not np.array_equal(once, other)
    assert other.min() >= 0 and other.max() < V and other.shape == (B, NEW)


def test_each_draw_has_a_key_of_its_own():
    # So hot that all tokens are equally likely: one key would draw one token again.
    _, tokens = go(sampling=Sampling(temperature=1e6))
    assert all(len(set(row)) > 1 for row in tokens.tolist())


ODDS = np.array([0.1, 0.5, 0.15, 0.25])


def frequencies(sampling, rows=4000):
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(ODDS, jnp.float32)), (rows, 4))
    tokens = draw(logits, jax.random.key(0), sampling)
    return np.bincount(tokens, minlength=4) / rows


@pytest.mark.parametrize(
    "sampling,kept",
    [
        (Sampling(), [0, 1, 2, 3]),
        (Sampling(top_k=3), [1, 2, 3]),
        (Sampling(top_k=4), [0, 1, 2, 3]),
        (Sampling(top_k=99), [0, 1, 2, 3]),
        # The fewest tokens that reach p: 0.5, 0.75, 0.9, 1.
        (Sampling(top_p=0.4), [1]),
        (Sampling(top_p=0.6), [1, 3]),
        (Sampling(top_p=0.8), [1, 2, 3]),
        (Sampling(top_p=0.95), [0, 1, 2, 3]),
        (Sampling(top_p=1e-6), [1]),
        # After top_k=2 the odds are 2/3 and 1/3: the first alone reaches 0.6.
        (Sampling(top_k=2, top_p=0.6), [1]),
        (Sampling(top_k=2, top_p=0.7), [1, 3]),
        # A temperature of 1/2 squares the odds: 0.72, 0.18, ...
        (Sampling(temperature=0.5, top_p=0.7), [1]),
        (Sampling(temperature=0.5), [0, 1, 2, 3]),
    ],
)
def test_draws_follow_the_kept_odds(sampling, kept):
    expected = np.zeros(4)
    expected[kept] = ODDS[kept] ** (1 / sampling.temperature)
    expected /= expected.sum()
    measured = frequencies(sampling)
    np.testing.assert_allclose(measured, expected, atol=0.03)
    assert set(np.flatnonzero(measured)) == set(kept)


def test_greedy_draws_the_likeliest():
    assert frequencies(GREEDY, rows=5).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(prompt=PROMPT[:, :0]), r"prompt must be \[B, T\] with T >= 1"),
        (dict(prompt=np.full((B, 2), V)), r"tokens in \[0, 17\), got 17"),
        (dict(prompt=np.full((B, 2), -1)), r"tokens in \[0, 17\), got -1"),
        (dict(count=0), "max_new_tokens must be at least 1, got 0"),
        (dict(segment=0), "segment must be at least 1, got 0"),
        # The last drawn token needs no room: it is not read.
        (dict(count=NEW + 2), "make 16 tokens to read; full attention has room for 15"),
    ],
)
def test_what_cannot_be_generated_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        go(**options)


def test_a_state_that_is_nearly_full_refuses_too(greedy):
    assert go(count=1, prompt=greedy[1][:, -1:], state=greedy[0])[1].shape == (B, 1)
    with pytest.raises(ValueError, match="make 2 tokens .* has room for 1 more"):
        go(count=1, prompt=PROMPT[:, :2], state=greedy[0])


@pytest.mark.parametrize(
    "wrong,message",
    [
        (dict(temperature=-0.1), "temperature must be >= 0, got -0.1"),
        (dict(temperature=float("nan")), "temperature must be >= 0, got nan"),
        (dict(top_k=-1), "top_k must be >= 0, got -1"),
        (dict(top_p=0.0), r"top_p must be in \(0, 1\], got 0.0"),
        (dict(top_p=1.1), r"top_p must be in \(0, 1\], got 1.1"),
    ],
)
def test_rules_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**wrong)
