"""The language model reads embeddings: whole sequences, ragged batches, masks."""

import dataclasses
import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memjax.mechanisms import AttentionConfig, GatedDeltaNetConfig, SlidingWindowConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.language_model.config import Architecture
from tests import tiny

B, T, V, D = 3, 8, 19, 16
CONFIG = ModelConfig(
    mechanisms=(
        AttentionConfig(D, 4, 2, 4, capacity=2 * T),
        SlidingWindowConfig(D, 4, 2, 4, window=3),
        GatedDeltaNetConfig(D, 4, 4, 4),
    ),
    num_layers=3,
    vocab_size=V,
    model_dim=D,
    hidden_dim=24,
    dtype="float32",
    remat=False,
)
LEARNED = dataclasses.replace(
    CONFIG,
    mechanisms=(AttentionConfig(D, 4, 2, 4, capacity=2 * T, rope_theta=None),),
    num_layers=2,
    architecture=Architecture(
        norm="layer",
        norm_first=False,
        feed_forward="relu",
        learned_positions=2 * T + 2,
        embedding_dim=12,
    ),
)
CONFIGS = {"hybrid": CONFIG, "learned": LEARNED}
TOKENS = jax.random.randint(jax.random.key(1), (B, T), 0, V)


@functools.cache
def build(name):
    return tiny.drawn(lambda: LanguageModel(CONFIGS[name], key=jax.random.key(0)))


@nnx.jit
def read(model, state, x, mask=None):
    return model.read(state, x, mask)


@nnx.jit
def read_ragged(model, state, x, lengths, mask=None):
    return model.read(state, x, mask, lengths)[0]


def element(tree, b):
    return jax.tree.map(lambda leaf: leaf[b : b + 1], tree)


def close(actual, expected):
    chex.assert_trees_all_close(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_encode_equals_read_from_the_empty_state(name):
    model = build(name)
    x = model.embed(TOKENS)
    assert x.shape == (B, T, model.width)
    encode = nnx.jit(lambda model, x: model.encode(x))
    _, features = read(model, model.init_state(B), x)
    assert features.shape == (B, T, model.width)
    close(encode(model, x), features)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_ragged_elements_equal_elements_read_alone(name):
    """Also when they go on; nothing of what lay behind their end is left."""
    model = build(name)
    x, lengths = model.embed(TOKENS), [0, 3, T]
    state, _ = read(model, model.init_state(B), x)
    after = read_ragged(model, state, x, jnp.array(lengths))
    for b, n in enumerate(lengths):
        alone = element(state, b)
        if n:
            alone, _ = read(model, alone, x[b : b + 1, :n])
        close(element(after, b), alone)


@pytest.mark.slow
def test_ragged_elements_with_a_mask():
    model, x = build("learned"), build("learned").embed(TOKENS)
    mask, lengths = jnp.ones((B, T), bool).at[:, 1].set(False), [3, 3, 3]
    after = read_ragged(model, model.init_state(B), x, jnp.array(lengths), mask)
    expected, _ = read(model, model.init_state(B), x[:, :3], mask[:, :3])
    close(after, expected)
    np.testing.assert_array_equal(after[-1], [2, 2, 2])


def test_bad_inputs_are_refused():
    model, learned = build("hybrid"), build("learned")
    x = model.embed(TOKENS)
    state, ones = model.init_state(B), jnp.ones((B, T), bool)
    for call in (
        lambda: model.read(state, x, ones),
        lambda: model.encode(x, ones),
        lambda: model.read(state, x, ones, jnp.array([1, 2, 3])),
    ):
        with pytest.raises(ValueError, match="mask must be None .*GatedDeltaNetConfig"):
            call()
    with pytest.raises(ValueError, match=r"3 rows.* 12 channels, got \[3, 8, 16\]"):
        learned.read(learned.init_state(B), x)
    with pytest.raises(ValueError, match=r"x must have 2 rows"):
        model.read(model.init_state(2), x)
    for lengths in (jnp.array([1, 2]), jnp.array([1.0, 2.0, 3.0])):
        with pytest.raises(ValueError, match=r"lengths must be integers \[3\], got"):
            inspect.unwrap(LanguageModel.read)(model, state, x, None, lengths)
    for mask in (ones[:, 1:], ones.astype(jnp.int32)):
        with pytest.raises(ValueError, match=r"mask must be bool\[3, 8\].* got"):
            inspect.unwrap(LanguageModel.encode)(learned, learned.embed(TOKENS), mask)
    text = jnp.zeros((1, 2 * T + 1, D))
    with pytest.raises(ValueError, match="x has 17 tokens, capacity is 16"):
        model.encode(text)


@pytest.mark.parametrize(
    "wrong,message",
    [
        (dict(learned_positions=2), "learned_positions must be 0, or at least 3, .* 2"),
        (dict(learned_positions=-1), "learned_positions must be 0, or at least 3"),
        (dict(embedding_dim=0), "embedding_dim must be at least 1, got 0"),
    ],
)
def test_contradictory_architectures_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Architecture(**wrong)
