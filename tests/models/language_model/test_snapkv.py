"""SnapKV: what it keeps, that nothing else changes, and that it reads on."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memjax.mechanisms import AttentionConfig, GLAConfig
from memjax.mechanisms.attention import AttentionState
from memjax.mechanisms.layers import projections
from memjax.mechanisms.layers.heads import HeadsConfig
from memjax.mechanisms.layers.rope import RopeScaling
from memjax.models import LanguageModel, ModelConfig, Sampling, generate
from memjax.models.language_model.config import Architecture
from memjax.models.language_model.snapkv import (
    SnapKVConfig,
    add_snapkv,
    choose,
    compact,
)
from tests import tiny as tiny_models

B, T, V = 2, 24, 29
ATTENTION = AttentionConfig(16, 4, 2, 4, capacity=T + 8, rope_theta=50.0)
CONFIG = ModelConfig(
    mechanisms=(ATTENTION,),
    num_layers=2,
    vocab_size=V,
    model_dim=16,
    hidden_dim=16,
    dtype="float32",
    remat=False,
)
# No token twice, so that its values tell which one it is.
TOKENS = jnp.stack(
    [jax.random.permutation(jax.random.key(row), V)[:T] for row in range(B)]
)
YARN = RopeScaling("yarn", 4.0, original_positions=8)
SMALL = SnapKVConfig(keep=10, room=T, window=3, kernel=3)


@functools.cache
def tiny():
    return tiny_models.drawn(lambda: LanguageModel(CONFIG, key=jax.random.key(0)))


def read(model, *pieces, state=None):
    """The state and the logits after each piece."""
    call = jax.jit(model.__call__)
    state, found = model.init_state(B) if state is None else state, []
    for piece in pieces:
        state, logits = call(state, piece)
        found.append(logits)
    return state, np.concatenate(found, axis=1)


@pytest.mark.slow
def test_large_cache_equals_full_attention():
    everything = add_snapkv(tiny(), SnapKVConfig(keep=T, room=8, window=3))
    pieces = (TOKENS[:, :9], TOKENS[:, 9:], TOKENS[:, :1], TOKENS[:, 1:2])
    state, logits = read(everything, *pieces)
    full, expected = read(tiny(), *pieces)
    np.testing.assert_array_equal(logits, expected)
    jax.tree.map(np.testing.assert_array_equal, state, full)


def oracle(queries, keys, visible, length, keep, kernel):
    """Listing 1 of the paper in float64, one row and one head at a time."""
    b, window, h, width = queries.shape
    g = keys.shape[2]
    slots = np.zeros((b, keep, g), int)
    for row in range(b):
        end = length[row]
        first = end - window
        for head in range(g):
            votes = np.zeros(first)
            for query_head in range(h):
                if query_head // (h // g) != head:
                    continue
                for i in range(window):
                    real = [s for s in range(first + i + 1) if visible[row, s]]
                    scores = keys[row, real, head].astype(float)
                    scores = scores @ queries[row, i, query_head] / width**0.5
                    weights = np.exp(scores - scores.max())
                    for s, weight in zip(real, weights / weights.sum(), strict=True):
                        if s < first:
                            votes[s] += weight
            half = kernel // 2
            pooled = np.array(
                [votes[max(0, s - half) : s + half + 1].max() for s in range(first)]
            )
            pooled[~visible[row, :first]] = -1
            best = np.sort(np.argsort(-pooled, kind="stable")[: keep - window])
            slots[row, :, head] = [*best, *range(first, end)]
    return slots


@pytest.mark.parametrize(("keep", "kernel"), [(6, 1), (9, 3), (12, 7)])
def test_choice_equals_the_papers_listing(keep, kernel):
    rng = np.random.default_rng(keep)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32) * 2

    queries, keys = draw(B, 3, 4, 4), draw(B, 20, 2, 4)
    length = np.array([20, 16])
    visible = np.arange(20)[None] < length[:, None]
    # Hidden beside the token that most queries want, whose votes are pooled.
    visible[0, 5] = False
    keys[0, 6] = 4 * queries[0].mean(axis=(0, 1))
    joined = jnp.asarray(keys.reshape(B, 20, -1))
    state = AttentionState(joined, joined, jnp.asarray(visible), jnp.asarray(length))
    found = jax.jit(choose, static_argnums=(2, 3))(queries, state, keep, kernel)
    expected = oracle(queries, keys, visible, length, keep, kernel)
    np.testing.assert_array_equal(found, expected)
    if kernel == 1:
        # Heads keep different tokens, or this would show little.
        assert np.any(expected[..., 0] != expected[..., 1])


def rotation(x, positions, theta):
    """RoPE as complex numbers in float64: channels i and i + K/2 are one."""
    half = x.shape[-1] // 2
    angles = positions[..., None] * theta ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag], axis=-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scaling", [None, RopeScaling("yarn", 4.0, original_positions=8)]
)
def test_compaction_preserves_relative_positions(scaling):
    heads = HeadsConfig(8, 2, 1, 4, rope_theta=50.0, rope_scaling=scaling)
    rng = np.random.default_rng(0)
    bare, values = rng.normal(size=(2, 1, 12, 1, 4)).astype(np.float32)
    turn = jax.jit(functools.partial(projections.apply_rope, heads))
    turned = np.asarray(turn(bare, np.arange(12, dtype=np.int32)[None]))
    # One head: its channels are those of a slot.
    state = AttentionState(
        jnp.asarray(turned[:, :, 0]),
        jnp.asarray(values[:, :, 0]),
        jnp.ones((1, 12), bool),
        jnp.array([12]),
    )
    slots = np.array([0, 3, 10, 11], np.int32)[None, :, None]
    small = jax.jit(functools.partial(compact, heads))(state, slots)
    assert small.length.tolist() == [4] and small.keys.shape == state.keys.shape
    assert small.visible[0].tolist() == [True] * 4 + [False] * 8
    small_keys = np.asarray(small.keys)[0, :4]
    small_values = np.asarray(small.values)[0, :4]
    np.testing.assert_array_equal(small_values, values[0, [0, 3, 10, 11], 0])
    # The next query stands at 4 now and stood at 12: scores must not show it.
    query = rng.normal(size=(1, 1, 1, 4)).astype(np.float32)

    def at(place):
        return np.asarray(turn(query, np.array([[place]], np.int32)))[0, 0, 0]

    before = turned[0, [0, 3, 10, 11], 0] @ at(12)
    np.testing.assert_allclose(small_keys @ at(4), before, atol=2e-5)
    if scaling is None:
        expected = rotation(bare[0, :, 0], np.arange(12) - 8, 50.0)[[0, 3, 10, 11]]
        np.testing.assert_allclose(small_keys, expected, atol=1e-5)


def rms(x, scale):
    mean = (x * x).mean(axis=-1, keepdims=True)
    return x / np.sqrt(mean + CONFIG.norm_epsilon) * np.asarray(scale.get_value())


def attend(q, k, v, old_keys, old_values):
    """One query head of one row: causal behind the old ones, in float64."""
    y = np.zeros_like(q)
    for t in range(len(q)):
        keys = np.concatenate([old_keys, k[: t + 1]])
        scores = keys @ q[t] / q.shape[-1] ** 0.5
        weights = np.exp(scores - scores.max())
        y[t] = weights @ np.concatenate([old_values, v[: t + 1]]) / weights.sum()
    return y


def by_head(cached):
    """[B, S, G, K] of the channels of all heads."""
    return np.asarray(cached, float).reshape(*cached.shape[:2], -1, ATTENTION.head_dim)


def masked(state, following, slots):
    """Logits of `following` where heads see chosen slots of an uncompressed cache.

    Keys stay where they were.
    """
    x = np.asarray(tiny().embed(following), float)
    positions = T + np.arange(following.shape[1])[None, :, None]
    for memory, kept, block in zip(state, slots, tiny().blocks, strict=True):
        hidden: Any
        mechanism, hidden = (
            block.parameters().mechanism,
            block.parameters().feed_forward,
        )
        h = rms(x, block.mechanism_norm)

        def project(w, h=h):
            return np.einsum("btd,dhk->bthk", h, np.asarray(w, float))

        q, k, v = map(project, (mechanism.query, mechanism.key, mechanism.value))
        q, k = (rotation(x, positions, ATTENTION.rope_theta) for x in (q, k))
        y = np.zeros_like(q)
        for b, head in np.ndindex(B, ATTENTION.num_heads):
            g = head // 2
            old = [by_head(m)[b, kept[b, :, g], g] for m in memory[:2]]
            y[b, :, head] = attend(q[b, :, head], k[b, :, g], v[b, :, g], *old)
        x = x + np.einsum("bthk,hkd->btd", y, np.asarray(mechanism.output, float))
        h = rms(x, block.feed_forward_norm)
        gate, up = h @ np.asarray(hidden.gate, float), h @ np.asarray(hidden.up, float)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ np.asarray(hidden.down, float)
    return tiny().logits(jnp.asarray(rms(x, tiny().norm), jnp.float32))


@pytest.mark.slow
def test_decoding_equals_attention_to_the_chosen_tokens():
    """Against all keys where they were, with a mask a head, in float64."""
    chosen = []
    spy = add_snapkv(tiny(), SMALL)
    state, first = read(spy, TOKENS)
    np.testing.assert_allclose(first, read(tiny(), TOKENS)[1], atol=1e-5)
    full, _ = read(tiny(), TOKENS)
    for small, layer in zip(state, full, strict=True):
        assert small.length.tolist() == [SMALL.keep] * B
        # Values have no positions: they tell which tokens were kept.
        match = np.all(
            by_head(small.values)[:, : SMALL.keep, None]
            == by_head(layer.values)[:, None, :T],
            axis=-1,
        )
        assert np.all(match.sum(axis=2) == 1)
        chosen.append(match.argmax(axis=2))
    following = TOKENS[:, :4][:, ::-1]
    singles = [following[:, i : i + 1] for i in range(4)]
    after, logits = read(spy, *singles, state=state)
    expected = masked(full, following, chosen)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert after[0].length.tolist() == [SMALL.keep + 4] * B


@pytest.mark.slow
def test_cache_is_bounded_and_generation_continues():
    model = add_snapkv(tiny(), SMALL)
    state, logits = read(model, *[TOKENS] * 4)
    assert np.all(np.isfinite(logits))
    sizes = {leaf.shape[1] for leaf in jax.tree.leaves(state) if leaf.ndim > 1}
    assert sizes == {SMALL.keep + SMALL.room}
    assert all(memory.length.tolist() == [SMALL.keep] * B for memory in state)
    greedy = Sampling(temperature=0.0)
    after, tokens, *_ = generate(
        model, state, TOKENS[:, :5], 3, key=jax.random.key(0), sampling=greedy
    )
    assert tokens.shape == (B, 3)
    assert after[0].length.tolist() == [SMALL.keep + 3] * B
    assert tiny().config == CONFIG


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SnapKVConfig(keep=32, window=32), "keep must be above window=32"),
        (lambda: SnapKVConfig(kernel=4), "kernel must be odd, got 4"),
        (lambda: SnapKVConfig(room=0), "room must be at least 1, got 0"),
        (lambda: SnapKVConfig(window=0), "window must be at least 1, got 0"),
    ],
)
def test_bad_sizes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_other_models_and_masks_are_refused():
    config = dataclasses.replace(
        CONFIG, mechanisms=(*CONFIG.mechanisms, GLAConfig(CONFIG.model_dim, 2, 4, 4))
    )
    shapes = nnx.eval_shape(lambda: LanguageModel(config, key=jax.random.key(0)))
    with pytest.raises(ValueError, match="attention in every layer, got .*GLAConfig"):
        add_snapkv(shapes, SMALL)
    model = add_snapkv(tiny(), SMALL)
    mask = jnp.ones((B, 4), bool)
    with pytest.raises(ValueError, match="mask must be None"):
        model.read(model.init_state(B), model.embed(TOKENS[:, :4]), mask)


def test_learned_positions_continue():
    style = Architecture(learned_positions=64)
    plain = dataclasses.replace(ATTENTION, rope_theta=None)
    config = dataclasses.replace(CONFIG, architecture=style, mechanisms=(plain,))
    model = tiny_models.drawn(lambda: LanguageModel(config, key=jax.random.key(2)))
    state, _ = read(add_snapkv(model, SMALL), TOKENS)
    assert state[-1].tolist() == [T] * B
    assert state[0].length.tolist() == [SMALL.keep] * B
