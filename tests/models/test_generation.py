"""Generation: prefill in pieces, decode on the same state, draw by the rules."""

import functools
import importlib
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memjax.mechanisms import AttentionConfig, ElasticMemoryConfig
from memjax.models import LanguageModel, ModelConfig, Sampling, generate, sampling
from memjax.models.generation import stop_strings
from memjax.models.sampling import Settings, draw
from tests import tiny as tiny_models

generate_module = importlib.import_module("memjax.models.generation")

B, P, NEW, V, LIMIT = 2, 9, 6, 17, 64
CONFIG = ModelConfig(
    mechanisms=(
        ElasticMemoryConfig(8, 2, 1, 4, block=4, order=4, decay=0.8),
        AttentionConfig(8, 2, 1, 4, capacity=LIMIT),
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
    return tiny_models.drawn(lambda: LanguageModel(CONFIG, key=jax.random.key(0)))


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


def go(count=NEW, prompt=PROMPT, sampling=GREEDY, seed=0, state=None, **options):
    options = {"key": jax.random.key(seed), "sampling": sampling, **options}
    return generate(tiny(), state, prompt, count, **options)


@pytest.fixture(scope="module")
def greedy():
    return go()


def test_all_tokens_are_drawn_without_a_stop(greedy):
    assert greedy.tokens.shape == greedy.log_probs.shape == (B, NEW)
    assert greedy.lengths.tolist() == [NEW] * B


def test_greedy_equals_argmax_of_full_text(greedy):
    text = np.concatenate([PROMPT, greedy.tokens], axis=1)
    after, logits = forward(jnp.asarray(text, jnp.int32))
    rows = np.asarray(jax.nn.log_softmax(logits))[:, P - 1 : -1]
    np.testing.assert_array_equal(greedy.tokens, np.argmax(rows, axis=-1))
    np.testing.assert_allclose(greedy.log_probs, rows.max(axis=-1), atol=1e-5)
    # All drawn tokens have been read.
    chex.assert_trees_all_close(greedy.state, after, rtol=1e-5, atol=1e-5)


def test_tokens_per_call_change_nothing(greedy):
    seen, size = [], 4
    found = go(tokens_per_call=size, progress=lambda *counts: seen.append(counts))
    assert seen == [(min(end, P), P) for end in range(size, P + size, size)]
    np.testing.assert_array_equal(found.tokens, greedy.tokens)
    chex.assert_trees_all_close(found.state, greedy.state, rtol=1e-5, atol=1e-5)


def test_returned_state_continues(greedy):
    first = go(count=3)
    text = np.concatenate([PROMPT, first.tokens], axis=1)
    np.testing.assert_array_equal(first.tokens, greedy.tokens[:, :3])
    # Kept unless it is given away.
    second, again = (go(2, text[:, :2], state=first.state) for _ in range(2))
    np.testing.assert_array_equal(second.tokens, again.tokens)
    last = go(2, text[:, :2], state=first.state, donate=True)
    np.testing.assert_array_equal(last.tokens, second.tokens)
    assert any(leaf.is_deleted() for leaf in jax.tree.leaves(first.state))


@pytest.mark.parametrize("size", [4, 1024])
def test_ragged_prompts_equal_single_prompts(size):
    """With 4 tokens per call the shorter prompt ends two calls before the longer."""
    lengths = (4, P)
    both = go(lengths=lengths, tokens_per_call=size)
    for row, length in enumerate(lengths):
        prompt = np.stack([PROMPT[row, :length]] * B)
        alone = go(prompt=prompt)
        np.testing.assert_array_equal(both.tokens[row], alone.tokens[0])
        # A token may be the likeliest behind other features too.
        np.testing.assert_allclose(both.log_probs[row], alone.log_probs[0], atol=1e-5)

        def element(state, at):
            return jax.tree.map(lambda leaf: leaf[at], state)

        chex.assert_trees_all_close(
            element(both.state, row), element(alone.state, 0), rtol=1e-5, atol=1e-5
        )


def test_stop_token_ends_one_batch_element(greedy):
    stop = int(greedy.tokens[0, 2])
    ends = [
        row.index(stop) + 1 if stop in row else NEW for row in greedy.tokens.tolist()
    ]
    assert ends[0] <= 3 and ends[0] != ends[1]
    found = go(stop_tokens=[stop])
    assert found.lengths.tolist() == ends
    for row, end in enumerate(ends):
        np.testing.assert_array_equal(found.tokens[row, :end], greedy.tokens[row, :end])
        assert (
            not found.tokens[row, end:].any() and not found.log_probs[row, end:].any()
        )
        # It read its own tokens, and none after them.
        assert int(found.state[1].length[row]) == P + end
    seen = []

    def stop_when(tokens):
        seen.append(tokens.shape[1])
        return [tokens.shape[1] == 2, False]

    streamed = go(stop_when=stop_when)
    assert seen == [*range(1, NEW + 1)] and streamed.lengths.tolist() == [2, NEW]
    np.testing.assert_array_equal(streamed.tokens[1], greedy.tokens[1])


def test_stop_strings():
    def letters(row):
        return "".join(chr(97 + i) for i in row)

    found = stop_strings(letters, ["bc", "d"])
    assert found(np.array([[0, 1, 2], [1, 1, 1], [3, 0, 0]])).tolist() == [1, 0, 1]
    for strings in ([], [""]):
        with pytest.raises(ValueError, match="strings must be at least one and not"):
            stop_strings(letters, strings)


def test_samples_share_the_prompt_and_differ():
    hot = Sampling(temperature=3.0)
    found = go(sampling=hot, samples=3)
    assert found.tokens.shape == (3 * B, NEW)
    assert len({tuple(row) for row in found.tokens.tolist()}) == 3 * B
    cold = go(samples=3)
    np.testing.assert_array_equal(cold.tokens, np.repeat(go().tokens, 3, axis=0))


def test_one_candidate_is_greedy(greedy):
    found = go(sampling=Sampling(temperature=0.7, top_k=1))
    np.testing.assert_array_equal(found.tokens, greedy.tokens)


def test_one_program_for_lengths_and_settings(greedy):
    programs = [*generate_module._read, generate_module._draw]
    go()
    before = [program._cache_size() for program in programs]
    others: tuple[dict[str, Any], ...] = (
        dict(count=2),
        dict(prompt=PROMPT[:, :7]),
        dict(sampling=Sampling(0.5, 3, 0.9), seed=4),
    )
    for options in others:
        go(**options)
    assert [program._cache_size() for program in programs] == before


def test_key_determines_samples(greedy):
    hot = Sampling(temperature=3.0)
    once, again, other = (go(sampling=hot, seed=seed).tokens for seed in (1, 1, 2))
    np.testing.assert_array_equal(once, again)
    assert not np.array_equal(once, other)
    assert other.min() >= 0 and other.max() < V and other.shape == (B, NEW)
    # A stream is drawn one token a call, of which each has a key of its own too.
    streamed = go(sampling=hot, seed=1, stop_when=lambda tokens: False)
    np.testing.assert_array_equal(streamed.tokens, once)


def test_draws_have_different_keys():
    # So hot that all tokens are equally likely: one key would draw one token again.
    tokens = go(sampling=Sampling(temperature=1e6)).tokens
    assert all(len(set(row)) > 1 for row in tokens.tolist())


def test_penalties_count_the_tokens_of_prompt_and_answer():
    settings = Sampling(0.0, repetition_penalty=9.0, presence_penalty=0.5)
    drawn = go(sampling=settings, read_before=(5,), vocab_size=9).tokens
    assert not np.array_equal(drawn, go(vocab_size=9).tokens)
    whole = np.concatenate([PROMPT, drawn], axis=1)
    logits = np.asarray(forward(whole)[1])[:, P - 1 :, :9]
    for row, token in np.ndindex(drawn.shape):
        scores = logits[row, token]
        read = np.isin(np.arange(9), [5, *whole[row, : P + token]])
        scores = np.where(read, np.where(scores > 0, scores / 9, scores * 9), scores)
        scores -= 0.5 * np.isin(np.arange(9), drawn[row, :token])
        assert drawn[row, token] == scores.argmax()


ODDS = np.array([0.1, 0.5, 0.15, 0.25])


def frequencies(sampling, rows=4000):
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(ODDS, jnp.float32)), (rows, 4))
    tokens = draw(logits, jax.random.key(0), Settings.of(sampling))
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
def test_sampling_frequencies(sampling, kept):
    expected = np.zeros(4)
    expected[kept] = ODDS[kept] ** (1 / sampling.temperature)
    expected /= expected.sum()
    measured = frequencies(sampling)
    np.testing.assert_allclose(measured, expected, atol=0.03)
    assert set(np.flatnonzero(measured)) == set(kept)


def test_top_p_of_one_keeps_all_despite_rounding():
    """The likeliest token alone has a probability of 1 in float32."""
    logits = jnp.asarray([[0.0, -30.0, -31.0, -32.0]])
    found = sampling._likeliest(logits, Settings.of(Sampling(top_k=3)))
    assert found.tolist() == [[0.0, -30.0, -31.0, -jnp.inf]]


def test_greedy_is_argmax():
    assert frequencies(GREEDY, rows=5).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(prompt=PROMPT[:, :0]), r"prompt must be integers \[B, T\] with T >= 1"),
        # Slow, as fast tests are also run with all annotations checked.
        pytest.param(
            dict(prompt=PROMPT * 1.0),
            r"prompt must be integers .* got float64\[2, 9\]",
            marks=pytest.mark.slow,
        ),
        (dict(prompt=np.full((B, 2), V)), r"tokens in \[0, 17\), got 17"),
        (dict(prompt=np.full((B, 2), -1)), r"tokens in \[0, 17\), got -1"),
        (dict(count=0), "max_new_tokens must be at least 1, got 0"),
        (dict(tokens_per_call=0), "tokens_per_call must be at least 1, got 0"),
        (dict(read_before=[V]), r"read_before must be in \[0, 17\), got \[17\]"),
        (dict(vocab_size=0), "vocab_size must be at least 1, got 0"),
        (dict(samples=0), "samples must be at least 1, got 0"),
        (dict(lengths=[1, 2, 3]), r"lengths must be integers \[2\]"),
        (dict(lengths=[0, 2]), r"lengths must be in \[1, T=9\], got \[0, 2\]"),
        (dict(lengths=[1, P + 1]), r"lengths must be in \[1, T=9\], got \[1, 10\]"),
        (dict(count=LIMIT), "make 73 tokens to read; full attention has room for 64"),
    ],
)
def test_invalid_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        go(**options)


def test_logits_that_are_nan_are_refused():
    model = nnx.clone(tiny())
    model.embedding[...] = model.embedding[...] * jnp.nan
    with pytest.raises(ValueError, match="logits are NaN"):
        generate(model, None, PROMPT, 2, key=jax.random.key(0))


@pytest.mark.parametrize(
    "wrong,message",
    [
        (dict(temperature=-0.1), "temperature must be >= 0, got -0.1"),
        (dict(temperature=float("nan")), "temperature must be >= 0, got nan"),
        (dict(temperature=1e300), r"temperature must be at most 1e\+30, got 1e\+300"),
        (dict(repetition_penalty=1e300), r"repetition_penalty must be at most 1e\+30"),
        (dict(top_k=2**31), r"top_k must be below 2\*\*31, got 2147483648"),
        (dict(top_k=-1), "top_k must be >= 0, got -1"),
        (dict(top_p=0.0), r"top_p must be in \(0, 1\], got 0.0"),
        (dict(top_p=1.1), r"top_p must be in \(0, 1\], got 1.1"),
        (dict(min_p=1.1), r"min_p must be in \[0, 1\], got 1.1"),
        (dict(repetition_penalty=0.0), "repetition_penalty must be > 0, got 0.0"),
        (dict(presence_penalty=3.0), r"presence_penalty must be in \[-2, 2\], got 3"),
    ],
)
def test_invalid_sampling_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**wrong)
