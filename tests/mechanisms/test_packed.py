"""Packed rows: each document is read by itself."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.mechanisms import AttentionConfig, SlidingWindowConfig, TrellisConfig
from memjax.mechanisms.layers import documents
from tests.kernels.on_tpu import interpret_attention
from tests.mechanisms.test_contract import BLOCK, CONFIGS, HEADS, check_slopes

B, T, D = 2, 12, 16
PACKS = {name: c for name, c in CONFIGS.items() if c.build().packed is not None}
# An option of an op, whose own tests have documents; and a capacity that is reached.
OPTIONS = ("lattice_unnormalised", "attention_full")
# Where documents begin: anywhere, or where a chunk of 4 does.
ANYWHERE = ((0, 5, 6), (0, 1, 9))
CHUNKS_OF_4 = ((0, 8), (0, 4, 8))
ROWS = [
    name if name == "sliding_window" else pytest.param(name, marks=pytest.mark.slow)
    for name in PACKS
    if name not in OPTIONS
]


def make_starts(places):
    starts = np.zeros((B, T), bool)
    for row, at in zip(starts, places, strict=True):
        row[list(at)] = True
    return starts


def spans(places):
    """Row, begin and end of every document."""
    return [
        (row, begin, end)
        for row, at in enumerate(places)
        for begin, end in zip(at, (*at[1:], T), strict=True)
    ]


def build(config) -> Any:
    return config.build()


@functools.cache
def case(name):
    """One program for packed rows, and for rows of one document each."""
    mechanism = build(PACKS[name])
    params = jax.jit(mechanism.init_params)(jax.random.key(0))
    places = ANYWHERE if mechanism.packed.chunk == 1 else CHUNKS_OF_4
    x, weights = np.random.default_rng(1).standard_normal(
        (2, len(spans(places)), T, D), np.float32
    )
    # Rows behind the packed ones count for nothing.
    weights[B:] = 0.0
    starts = np.zeros(x.shape[:2], bool)
    starts[:, 0] = True
    starts[:B] = make_starts(places)

    def loss(params, x, starts, weights):
        y = mechanism.packed.whole(params, x, starts)
        return jnp.sum(y * weights), y

    packed = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    return mechanism, params, x, starts, weights, places, packed


def to_rows(places, x):
    """Every document at the front of a row of its own; nothing reads ahead."""
    return np.stack(
        [np.roll(x[row], -begin, axis=0) for row, begin, _ in spans(places)]
    )


def from_rows(places, rows):
    """The inverse of `to_rows`."""
    x = np.zeros_like(rows)
    for (row, begin, end), own in zip(spans(places), rows, strict=True):
        x[row, begin:end] = own[: end - begin]
    return x


@pytest.mark.parametrize("name", ROWS)
def test_document_equals_a_row_of_its_own(name):
    mechanism, params, x, starts, weights, places, packed = case(name)
    (_, y), (by_params, by_x) = packed(params, x, starts, weights)
    rows, own = to_rows(places, x), to_rows(places, weights)
    for weight, (_, begin, end) in zip(own, spans(places), strict=True):
        weight[end - begin :] = 0.0
    alone = np.zeros_like(starts)
    alone[:, 0] = True
    (_, y_rows), (by_params_alone, by_rows) = packed(params, rows, alone, own)
    chex.assert_trees_all_close(
        (y[:B], by_x[:B], by_params),
        (
            from_rows(places, y_rows)[:B],
            from_rows(places, by_rows)[:B],
            by_params_alone,
        ),
        rtol=1e-4,
        atol=1e-4,
    )
    whole = jax.jit(mechanism.whole)(params, rows, None)
    chex.assert_trees_all_close(y_rows, whole, rtol=1e-5, atol=1e-5)

    def loss(at):
        (_, y), _ = packed(*at, starts, weights)
        return np.vdot(np.asarray(y, np.float64), weights)

    check_slopes(loss, (params, x), (by_params, by_x))


@pytest.mark.parametrize("name", ROWS)
def test_documents_of_a_row_are_independent_bit_by_bit(name):
    _, params, x, starts, weights, places, packed = case(name)

    def read(x):
        return np.asarray(packed(params, x, starts, weights)[0][1])[:B]

    before = read(x)
    for row, begin, end in spans(places):
        changed = x.copy()
        changed[row, begin:end] *= -30.0
        own = np.zeros((B, T), bool)
        own[row, begin:end] = True
        assert (read(changed) == before)[~own].all()
        assert (read(changed) != before)[own].any(axis=-1).all()


def test_mechanisms_without_packed_rows():
    without = {name for name in CONFIGS if name not in PACKS}
    blocks = ("hybrid", "elastic_memory", "memorizing", "melodi")
    expected = {name for name in CONFIGS if name.startswith(blocks)}
    assert without == {*expected, "sliding_window_sinks"}


@pytest.mark.slow
def test_start_inside_a_chunk_is_refused():
    mechanism = build(TrellisConfig(**BLOCK, slots=5, chunk_size=4))
    assert mechanism.packed.chunk == 4
    params = jax.jit(mechanism.init_params)(jax.random.key(0))
    x, starts = jnp.ones((B, T, D)), make_starts(((0, 8), (0, 5)))
    with pytest.raises(ValueError, match="reset must be where a chunk of 4 starts"):
        mechanism.packed.whole(params, x, jnp.asarray(starts))
    # Inside jit, where the place is not known, nothing of it passes for a result.
    y = np.asarray(jax.jit(mechanism.packed.whole)(params, x, starts))
    assert np.isnan(y[1, 5:]).all()
    assert np.isfinite(y[0]).all() and np.isfinite(y[1, :5]).all()


@pytest.mark.parametrize("starts", [np.ones((B, T), np.int32), np.ones((B, 1), bool)])
def test_starts_of_another_shape_or_type_are_refused(starts):
    with pytest.raises(ValueError, match=r"starts must be bool\[2, 12\], as x is"):
        documents.check_starts(jnp.asarray(starts), jnp.ones((B, T, D)))
    mechanism, params, x, *_ = case("gated_deltanet")
    with pytest.raises(ValueError, match="starts must be bool"):
        mechanism.packed.whole(params, jnp.asarray(x[:B]), jnp.asarray(starts))


def test_positions_count_from_the_start_of_each_document():
    starts = jnp.asarray([[0, 0, 1, 0, 1, 1], [1, 0, 0, 0, 0, 0]], bool)
    found = documents.positions(starts)
    np.testing.assert_array_equal(found, [[0, 1, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5]])


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 100])
def test_kernel_of_a_tpu_sees_a_document_alone(window, monkeypatch):
    sizes = {**HEADS, "head_dim": 64}
    config = AttentionConfig(**sizes)
    if window is not None:
        config = SlidingWindowConfig(**sizes, window=window)
    mechanism = build(config)
    params = jax.jit(mechanism.init_params)(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (1, 256, D)).astype(jnp.bfloat16)
    starts = jnp.zeros((1, 256), bool).at[0, jnp.asarray([70, 200])].set(True)
    expected = jax.jit(mechanism.packed.whole)(params, x, starts)
    # The branch for TPUs, its kernels interpreted.
    monkeypatch.setattr(
        jax.lax,
        "platform_dependent",
        lambda *args, tpu=None, default, **_: (tpu or default)(*args),
    )
    interpret_attention(monkeypatch)
    found = jax.jit(lambda *given: mechanism.packed.whole(*given))(params, x, starts)
    chex.assert_trees_all_close(
        found.astype(jnp.float32), expected.astype(jnp.float32), rtol=0.05, atol=0.05
    )
