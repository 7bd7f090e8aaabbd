"""Attention: capacity, RoPE, grouped queries, windows."""

import functools
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.mechanisms.attention import AttentionConfig
from memjax.mechanisms.layers import rope
from memjax.mechanisms.layers.rope import RopeScaling
from memjax.mechanisms.layers.softmax import cached
from memjax.mechanisms.layers.softmax import dot_product_attention as attend
from memjax.mechanisms.sliding_window import SlidingWindowConfig

B, T, D, H, G, K = 2, 11, 8, 4, 2, 4
SIZES: dict[str, Any] = dict(
    model_dim=D, num_heads=H, num_kv_heads=G, head_dim=K, rope_theta=100.0
)


def compiled(mechanism):
    return mechanism._replace(
        step=jax.jit(mechanism.step), apply=jax.jit(mechanism.apply)
    )


@functools.cache
def full(capacity):
    mechanism = AttentionConfig(**SIZES, capacity=capacity).build()
    return compiled(mechanism)


@functools.cache
def window_of(size):
    mechanism = SlidingWindowConfig(**SIZES, window=size).build()
    return compiled(mechanism)


@functools.cache
def drawn_params():
    return jax.jit(full(T).init_params)(jax.random.key(0))


@functools.cache
def drawn_inputs():
    drawn = np.random.default_rng(1).standard_normal((B, T, D))
    return jnp.asarray(drawn, jnp.float32)


def apply_rope(x, theta):
    """RoPE as complex rotation, float64: channels i and i + K/2 are one number."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[None, :, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def oracle(params, x, band):
    """Softmax attention in float64: query t sees the `band` keys up to its own."""
    x = np.asarray(x, np.float64)
    query, key, value, output = (np.asarray(w, np.float64) for w in params[:4])
    q = apply_rope(np.einsum("btd,dhk->bthk", x, query), 100.0)
    k = apply_rope(np.einsum("btd,dgk->btgk", x, key), 100.0).repeat(H // G, axis=2)
    v = np.einsum("btd,dgk->btgk", x, value).repeat(H // G, axis=2)
    scores = np.einsum("bthk,bshk->bhts", q, k) / np.sqrt(K)
    back = np.arange(x.shape[1])[:, None] - np.arange(x.shape[1])[None]
    weights = np.exp(scores) * ((back >= 0) & (back < band))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("bhts,bshk,hkd->btd", weights, v, output)


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("capacity", [T, T + 3])
def test_full_attention_is_softmax_over_the_past(capacity):
    _, y = full(capacity).apply(
        drawn_params(), full(capacity).init_state(B), drawn_inputs()
    )
    close(y, oracle(drawn_params(), drawn_inputs(), T))


@pytest.mark.parametrize("window", [1, 4, T + 5])
def test_a_window_is_a_band_of_full_attention(window):
    mechanism = window_of(window)
    _, y = mechanism.apply(drawn_params(), mechanism.init_state(B), drawn_inputs())
    close(y, oracle(drawn_params(), drawn_inputs(), window))


def test_grouped_queries_equal_repeated_heads():
    def repeat(weight):
        return jnp.repeat(weight, H // G, axis=1)

    repeated = drawn_params()._replace(
        key=repeat(drawn_params().key), value=repeat(drawn_params().value)
    )
    sizes: dict[str, Any] = SIZES | dict(num_kv_heads=H)
    alike = compiled(AttentionConfig(**sizes, capacity=T).build())
    _, y = alike.apply(repeated, alike.init_state(B), drawn_inputs())
    _, grouped = full(T).apply(drawn_params(), full(T).init_state(B), drawn_inputs())
    close(y, grouped)


def test_rope_sees_distances_alone():
    random = np.random.default_rng(2)
    q, k = random.standard_normal((2, 1, 1, 1, K)).astype(np.float32).repeat(6, axis=2)
    at = jnp.array([0, 1, 2, 500, 501, 502], jnp.int32)
    rotate = jax.jit(lambda x: rope.rotate(x, at, 100.0))
    turned = [np.asarray(rotate(x))[0, :, 0] for x in (q, k)]
    scores = turned[0] @ turned[1].T
    np.testing.assert_allclose(scores[:3, :3], scores[3:, 3:], atol=1e-4)
    # And distances do differ.
    assert np.abs(scores[0, 0] - scores[0, 2]) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("first", [3, 7])
def test_outputs_are_nan_beyond_the_capacity(first):
    """And right before it, also where the last segment is as long as the cache."""
    mechanism = full(7)
    state, before = mechanism.apply(
        drawn_params(), mechanism.init_state(B), drawn_inputs()[:, :first]
    )
    state, after = mechanism.apply(
        drawn_params(), state, drawn_inputs()[:, first : first + 7]
    )
    y = np.concatenate([before, after], axis=1)
    close(y[:, :7], oracle(drawn_params(), drawn_inputs()[:, :7], 7))
    assert y.shape[1] > 7 and np.isnan(y[:, 7:]).all()
    _, one = mechanism.step(drawn_params(), state, drawn_inputs()[:, 0])
    assert np.isnan(one).all()


def test_only_the_row_that_overflows_is_nan():
    mechanism = full(7)
    state, _ = mechanism.apply(
        drawn_params(), mechanism.init_state(B), drawn_inputs()[:, :7]
    )
    state = mechanism.reset(state, jnp.array([True, False]))
    _, y = mechanism.apply(drawn_params(), state, drawn_inputs()[:, :7])
    close(y[0], oracle(drawn_params(), drawn_inputs()[:1, :7], 7)[0])
    assert np.isnan(y[1]).all()


def test_a_segment_longer_than_the_cache_is_refused():
    mechanism = AttentionConfig(**SIZES, capacity=7).build()
    with pytest.raises(ValueError, match="x has 11 tokens, capacity is 7"):
        mechanism.apply(drawn_params(), mechanism.init_state(B), drawn_inputs())


def test_window_is_exact_far_into_a_stream():
    """130 windows on, the state gives what its last tokens alone give."""
    window, length = 3, 78
    x = np.random.default_rng(4).standard_normal((5, 1, length, D)).astype(np.float32)
    mechanism = window_of(window)
    state = mechanism.init_state(1)
    for segment in x[:-1]:
        state, _ = mechanism.apply(drawn_params(), state, segment)
    state, y = mechanism.apply(drawn_params(), state, x[-1])
    fresh = np.concatenate([x[-1, :, at - 2 : at + 1] for at in (2, 40, 77)])
    expected = oracle(drawn_params(), fresh, window)[:, -1]
    close(np.asarray(y)[0, [2, 40, 77]], expected)
    empty = mechanism.init_state(1)
    last, _ = mechanism.apply(drawn_params(), empty, x[-1])
    jax.tree.map(close, state, last)


def test_ring_with_scaled_rope_steps_equal_apply():
    scaling = RopeScaling("yarn", 4.0, original_positions=16)
    config = SlidingWindowConfig(**SIZES, window=3, rope_scaling=scaling)
    mechanism = compiled(config.build())
    x = drawn_inputs()[:, :8]
    assert mechanism.whole is not None
    expected = jax.jit(mechanism.whole)(drawn_params(), x, None)
    state, found = mechanism.init_state(B), []
    for segment in (x[:, :4], x[:, 4:5], x[:, 5:6], x[:, 6:]):
        state, y = mechanism.apply(drawn_params(), state, segment)
        found.append(y)
    close(np.concatenate(found, axis=1), expected)


@pytest.mark.slow
@pytest.mark.parametrize("least_cut", [3, 96])
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (7, 12), (4, 5), (1, 6)])
def test_last_queries_see_all_earlier_keys(monkeypatch, least_cut, queries, keys):
    monkeypatch.setattr(attend, "LEAST_CUT", least_cut)
    random = np.random.default_rng(queries + keys)
    q = random.standard_normal((B, queries, H, K))
    k, v = random.standard_normal((2, B, keys, G, K))
    visible = random.random((B, keys)) < 0.7
    visible[:, 0] = True
    k_all, v_all = (x.repeat(H // G, axis=2) for x in (k, v))
    scores = np.einsum("bthk,bshk->bhts", q, k_all) / np.sqrt(K)
    at = np.arange(keys - queries, keys)
    seen = np.arange(keys)[None] <= at[:, None]
    weights = np.exp(scores) * (seen[None, None] & visible[:, None, None])
    weights /= weights.sum(axis=-1, keepdims=True)
    expected = np.einsum("bhts,bshk->bthk", weights, v_all)
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    # A function of its own: the bound is read when it is traced.
    y = jax.jit(lambda *x: attend.causal(*x))(q, k, v, visible)
    np.testing.assert_allclose(y, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["full", "window"])
def test_attention_in_pieces_is_attention(monkeypatch, name):
    """Two queries or one block at a time, as in a long context; gradients too."""
    mechanism, band = (full(T + 3), T) if name == "full" else (window_of(4), 4)

    def run():
        def call(x):
            return inspect.unwrap(mechanism.apply)(drawn_params(), state, x)[1]

        @jax.jit
        def both(x):
            y, pull = jax.vjp(call, x)
            return y, pull(x)[0]

        return both(drawn_inputs())

    state = mechanism.init_state(B)
    _, gradient = run()
    monkeypatch.setattr(attend, "MAX_SCORES", 300)
    y, in_pieces = run()
    close(y, oracle(drawn_params(), drawn_inputs(), band))
    close(in_pieces, gradient)


@pytest.mark.parametrize(
    "wrong,message",
    [
        (dict(model_dim=0), "model_dim must be at least 1, got 0"),
        (dict(num_kv_heads=3), "num_kv_heads must divide num_heads=4, got 3"),
        (dict(head_dim=3), "head_dim must be even, got 3"),
        (dict(rope_theta=float("nan")), "rope_theta must be positive, got nan"),
        (dict(rope_theta=float("inf")), r"rope_theta must be at most 1e\+38, got inf"),
        (dict(rope_theta=0.5), "rope_theta must be at least 1, .* got 0.5"),
        (
            dict(rope_theta=1.0, rope_scaling=RopeScaling("yarn", 2.0)),
            "above 1 with YaRN, got 1.0",
        ),
        (dict(qk_norm_epsilon=1e308), "qk_norm_epsilon must be at most 1, got"),
    ],
)
def test_invalid_sizes_are_refused(wrong, message):
    for config in (AttentionConfig, SlidingWindowConfig):
        with pytest.raises(ValueError, match=message):
            config(**SIZES | wrong)
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        AttentionConfig(**SIZES, capacity=0)
    with pytest.raises(ValueError, match="window must be at least 1, got -1"):
        SlidingWindowConfig(**SIZES, window=-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "at_once,joined", [(1, False), (4, False), (4, True), (11, True)]
)
def test_keys_in_parts_are_one_softmax(monkeypatch, at_once, joined):
    """Values and all gradients; 11 keys in parts of 4 overlap by one.

    Heads that take one product together get the same from it, and products with keys
    first.
    """
    monkeypatch.setattr(attend, "MOST_JOINED", 0)
    monkeypatch.setattr(attend, "FEW_ROWS", 0)
    whole, gradients = in_one_part()
    monkeypatch.undo()
    monkeypatch.setattr(attend, "CACHED_SCORES", 0)
    monkeypatch.setattr(attend, "LEAST_KEYS", at_once)
    monkeypatch.setattr(attend, "MOST_JOINED", 3 * H * G if joined else 0)
    tokens = drawn_cache()[:3]
    # Or the comparison would be of one program with itself.
    program = str(jax.make_jaxpr(lambda *x: read_cache(*x))(*tokens))
    assert ("scan" in program) == (at_once < 11)
    assert (f"{B},1,{3 * H},{G * K}]" in program) == joined
    parts, gradients_in_parts = pulled()
    close(parts, whole)
    jax.tree.map(close, gradients_in_parts, gradients)
    if at_once != 4:
        return
    half = (x.astype(jnp.bfloat16) for x in tokens)
    y = np.asarray(jax.jit(lambda *x: read_cache(*x))(*half), np.float32)
    np.testing.assert_allclose(y, whole, atol=0.1)


@functools.cache
def drawn_cache():
    """Queries, keys, values and a cotangent."""
    random = np.random.default_rng(0)
    q, k, v, ct = (
        random.standard_normal((B, t, heads, K)).astype(np.float32)
        for t, heads in ((3, H), (11, G), (11, G), (3, H))
    )
    # Large scores in one part alone: the others' weights vanish beside them.
    k[:, 5] *= 30
    return q, k, v, ct


def rows(cache):
    return cache.reshape(*cache.shape[:2], -1)


def read_cache(q, k, v):
    # The first part of a row may be hidden whole.
    visible = np.ones((B, 11), bool)
    visible[0, :6] = False
    before = jnp.array([8, 5], jnp.int32)
    return cached.from_rows(q, rows(k), rows(v), before, jnp.asarray(visible))


def pulled():
    """Values and gradients; the bounds are read when this is traced."""

    def both(q, k, v, ct):
        y, pull = jax.vjp(lambda *x: read_cache(*x), q, k, v)
        return y, pull(ct)

    return jax.jit(both)(*drawn_cache())


in_one_part = functools.cache(pulled)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "tpu"])
def test_slots_far_behind_the_filled_ones_are_not_read(monkeypatch, backend):
    """They hold NaN; values and gradients are those of a cache without them."""
    monkeypatch.setattr(attend, "LEAST_BLOCK", 4)
    monkeypatch.setattr(cached, "LEAST_PREFIX", 4)
    random = np.random.default_rng(1)
    q, k, v = (
        jnp.asarray(random.standard_normal((B, t, heads, K)), jnp.float32)
        for t, heads in ((2, H), (64, G), (64, G))
    )
    before = jnp.array([9, 5], jnp.int32)
    far = jnp.arange(64)[None, :, None, None] >= 16
    visible = jnp.ones((B, 64), bool).at[0, :4].set(False)

    @jax.jit
    def run(q, k, v, visible):
        def read(q, k, v):
            return cached.from_rows(q, rows(k), rows(v), before, visible)

        y, pull = jax.vjp(read, q, k, v)
        return y, pull(q)

    y, gradients = run(q, k[:, :16], v[:, :16], visible[:, :16])
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    jax.clear_caches()
    found, more = run(
        q, jnp.where(far, jnp.nan, k), jnp.where(far, jnp.nan, v), visible
    )
    close(found, y)
    for a, b in zip(more, gradients, strict=True):
        close(a[:, :16], b)
        assert not np.any(a[:, 16:])


@pytest.mark.slow
@pytest.mark.parametrize("of", [full, window_of])
def test_a_loop_of_steps_copies_no_cache(of):
    """One text of one row: XLA joined the write of a token with each read of it."""
    slots = 64
    mechanism, params = of(slots), drawn_params()

    def run(params, state, x):
        def body(_, carry):
            state, x = carry
            return mechanism.step(params, state, x)

        return jax.lax.fori_loop(0, 32, body, (state, x))

    given = (params, mechanism.init_state(1), jnp.ones((1, D)))
    program = jax.jit(run, donate_argnums=1).lower(*given).compile()
    text = str(program.as_text())
    cache = re.escape(f"f32[1,{slots},{G * K}]")
    assert re.search(rf"= {cache}\S* fusion\(", text)
    assert not re.search(rf"= {cache}\S* copy\(", text)
