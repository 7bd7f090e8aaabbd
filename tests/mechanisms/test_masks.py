"""Attention with masked tokens and rows of different lengths."""

import functools
from typing import Any

import chex
import jax
import numpy as np
import pytest

from memjax import mechanisms
from memjax.mechanisms.attention import AttentionConfig
from memjax.mechanisms.layers.ragged import apply_ragged
from memjax.mechanisms.sliding_window import SlidingWindowConfig

B, T, D, H, G, K, W = 3, 9, 8, 2, 1, 4, 4
SIZES: dict[str, Any] = dict(model_dim=D, num_heads=H, num_kv_heads=G, head_dim=K)
MECHANISMS = {
    "attention": AttentionConfig(**SIZES, capacity=2 * T).build(),
    "sliding_window": SlidingWindowConfig(**SIZES, window=W).build(),
    "gated_deltanet": mechanisms.GatedDeltaNetConfig(D, 2, 4, 4).build(),
}
JITTED: dict[str, Any] = {
    name: m._replace(
        apply=jax.jit(m.apply),
        apply_masked=m.apply_masked and jax.jit(m.apply_masked),
        whole=m.whole and jax.jit(m.whole),
    )
    for name, m in MECHANISMS.items()
}
BANDS = {"attention": T, "sliding_window": W}
# Padding at the start, a hole and a padded end; the last row sees all.
MASK = np.array([[0, 0, 1, 1, 1, 1, 0, 1, 1], [1, 1, 0, 1, 1, 1, 1, 0, 0], [1] * 9]) > 0


@functools.cache
def drawn_inputs():
    return np.random.default_rng(1).standard_normal((B, T, D), np.float32)


@functools.cache
def build(name) -> Any:
    mechanism = JITTED[name]
    return mechanism, mechanism.init_params(jax.random.key(0))


def apply_rope(x):
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * 500_000.0 ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[None, :, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def oracle(params, mask, band):
    """Float64; NaN where a token sees none."""
    x = np.asarray(drawn_inputs(), np.float64)
    query, key, value, output = (np.asarray(w, np.float64) for w in params[:4])
    q, k = (apply_rope(np.einsum("btd,dhk->bthk", x, w)) for w in (query, key))
    v = np.einsum("btd,dgk->btgk", x, value)
    scores = np.einsum("bthk,bsgk->bhts", q, k) / np.sqrt(K)
    back = np.arange(T)[:, None] - np.arange(T)[None]
    weights = np.exp(scores) * ((back >= 0) & (back < band)) * mask[:, None, None]
    with np.errstate(invalid="ignore"):
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return np.einsum("bhts,bsgk,hkd->btd", weights, v, output)


@pytest.mark.parametrize("name", BANDS)
def test_masked_tokens_keep_their_position_and_are_invisible(name):
    mechanism, params = build(name)
    expected = oracle(params, MASK, BANDS[name])
    meant = np.isfinite(expected).all(axis=-1) & MASK
    assert meant.sum() == MASK.sum()
    empty = mechanism.init_state(B)
    _, y = mechanism.apply_masked(params, empty, drawn_inputs(), MASK, None)
    np.testing.assert_allclose(np.asarray(y)[meant], expected[meant], atol=1e-5)
    # A text read whole, longer than the window or not, is the same.
    whole = mechanism.whole(params, drawn_inputs(), MASK)
    np.testing.assert_allclose(np.asarray(whole)[meant], expected[meant], atol=1e-5)
    short = mechanism.whole(params, drawn_inputs()[:, :W], MASK[:, :W])
    meant = meant[:, :W]
    np.testing.assert_allclose(
        np.asarray(short)[meant], expected[:, :W][meant], atol=1e-5
    )
    # And so it is in pieces, where masked tokens lie in the memory.
    state, pieces = empty, []
    for at in range(0, T, 3):
        piece = slice(at, at + 3)
        state, y = mechanism.apply_masked(
            params, state, drawn_inputs()[:, piece], MASK[:, piece], None
        )
        pieces.append(y)
    pieces = np.concatenate(pieces, axis=1)
    meant = np.isfinite(expected).all(axis=-1) & MASK
    np.testing.assert_allclose(pieces[meant], expected[meant], atol=1e-5)


@pytest.mark.parametrize("name", BANDS)
def test_no_mask_is_a_mask_of_ones(name):
    mechanism, params = build(name)
    empty, ones = mechanism.init_state(B), np.ones((B, T), bool)
    state, y = mechanism.apply(params, empty, drawn_inputs())
    chex.assert_trees_all_close(
        mechanism.apply_masked(params, empty, drawn_inputs(), ones, None), (state, y)
    )
    chex.assert_trees_all_close(
        mechanism.whole(params, drawn_inputs(), None), y, atol=1e-5
    )
    chex.assert_trees_all_close(
        mechanism.whole(params, drawn_inputs(), ones), y, atol=1e-5
    )


@pytest.mark.parametrize("name", MECHANISMS)
def test_rows_of_different_lengths_equal_single_rows(name):
    mechanism, params = build(name)
    x, empty = drawn_inputs(), mechanism.init_state(B)
    read = jax.jit(
        lambda before, x, lengths: apply_ragged(
            mechanism, params, before, x, None, lengths
        )
    )
    # At the start of a text, and inside it.
    for before in (empty, mechanism.apply(params, empty, x[:, :4])[0]):
        before = jax.device_get(before)
        for lengths in ([0, 4, T], [T, 0, 4]):
            after, y = jax.device_get(read(before, x, np.array(lengths)))
            for b, n in enumerate(lengths):
                one = slice(b, b + 1)
                alone = jax.tree.map(lambda leaf, one=one: leaf[one], before)
                outputs = np.zeros((1, 0, D))
                if n:
                    alone, outputs = mechanism.apply(params, alone, x[one, :n])
                found = jax.tree.map(lambda leaf, one=one: leaf[one], after)
                chex.assert_trees_all_close(found, alone, rtol=1e-5, atol=1e-5)
                np.testing.assert_allclose(y[one, :n], outputs, rtol=1e-5, atol=1e-5)


def test_a_text_beyond_the_capacity_is_refused():
    mechanism, params = build("attention")
    with pytest.raises(ValueError, match="x has 27 tokens, capacity is 18"):
        mechanism.whole(params, np.zeros((B, 3 * T, D), np.float32), None)
