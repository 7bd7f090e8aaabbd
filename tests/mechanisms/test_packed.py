"""Packed rows: each document is read by itself."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.mechanisms import SlidingWindowConfig
from memjax.mechanisms.layers import documents
from tests.kernels.on_tpu import interpret_attention
from tests.mechanisms.slopes import check_slopes
from tests.mechanisms.test_contract import CONFIGS, HEADS

B, T, D = 2, 12, 16
PACKS = {name: c for name, c in CONFIGS.items() if c.build().packed is not None}
# Options of an op, whose own tests have documents, styles that see no neighbours, and
# cells of which another row has the documents too ("parallel" has Mamba-2).
OPTIONS = (
    "attention_full",
    "gated_deltanet",
    "mamba2",
    "retention",
    "gla_tied",
    "gsa_published",
    "trellis_nonlinear",
    "falcon_mamba",
    "lattice_unnormalised",
    "lattice_sparse",
)
# Of one cell, one that is initialised inside a row, one scan and all of attention: ops'
# own tests have the gradients of the others.
GRADIENTS = (
    "sliding_window",
    "attention",
    "gated_deltanet_published",
    "trellis",
    "mamba",
)
# Where documents begin: anywhere, or where a chunk of 4 does.
ANYWHERE = ((0, 5, 6), (0, 1, 9))
CHUNKS_OF_4 = ((0, 8), (0, 4, 8))


def rows(names):
    slow = pytest.mark.slow
    return [
        name if name == "sliding_window" else pytest.param(name, marks=slow)
        for name in names
    ]


ROWS = rows(name for name in PACKS if name not in OPTIONS)


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
def case(name) -> Any:
    """Params, x, starts and the places of a mechanism; its packed rows, compiled.

    `read` gives the outputs; `differentiate`, in rows that have it, a loss by `weights`
    with the outputs, and its gradients. Rows behind the packed ones have one document.
    """
    mechanism = build(PACKS[name])
    params = mechanism.init_params(jax.random.key(0))
    places = ANYWHERE if mechanism.packed.chunk == 1 else CHUNKS_OF_4
    shape = (len(spans(places)), T, D)
    x = np.random.default_rng(1).standard_normal(shape, np.float32)
    starts = np.zeros(x.shape[:2], bool)
    starts[:B] = make_starts(places)
    # A row's first token starts a document, whatever is said of it.
    starts[1:, 0] = False
    if name not in GRADIENTS:
        return (
            mechanism,
            params,
            x,
            starts,
            places,
            jax.jit(mechanism.packed.whole),
            None,
        )

    def loss(params, x, starts, weights):
        y = mechanism.packed.whole(params, x, starts)
        return jnp.sum(y * weights), y

    differentiate = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))

    def read(params, x, starts):
        return differentiate(params, x, starts, np.ones_like(x))[0][1]

    return mechanism, params, x, starts, places, read, differentiate


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
    mechanism, params, x, starts, places, read, _ = case(name)
    y = read(params, x, starts)
    alone = jax.jit(mechanism.whole)(params, to_rows(places, x), None)
    chex.assert_trees_all_close(
        y[:B], from_rows(places, alone)[:B], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", rows(GRADIENTS))
def test_gradients_of_a_document_equal_those_of_a_row_of_its_own(name):
    _, params, x, starts, places, _, differentiate = case(name)
    weights = np.random.default_rng(2).standard_normal(x.shape, np.float32)
    weights[B:] = 0.0
    _, (by_params, by_x) = differentiate(params, x, starts, weights)
    own = to_rows(places, weights)
    for weight, (_, begin, end) in zip(own, spans(places), strict=True):
        weight[end - begin :] = 0.0
    alone = np.zeros_like(starts)
    alone[:, 0] = True
    _, (alone_by_params, by_rows) = differentiate(
        params, to_rows(places, x), alone, own
    )
    chex.assert_trees_all_close(
        (by_x[:B], by_params),
        (from_rows(places, by_rows)[:B], alone_by_params),
        rtol=1e-4,
        atol=1e-4,
    )

    def loss(at):
        (_, y), _ = differentiate(*at, starts, weights)
        return np.vdot(np.asarray(y, np.float64), weights)

    check_slopes(loss, (params, x), (by_params, by_x))


@pytest.mark.parametrize("name", ROWS)
def test_documents_of_a_row_are_independent_bit_by_bit(name):
    _, params, x, starts, places, read, _ = case(name)
    before = np.asarray(read(params, x, starts))[:B]
    for row, begin, end in spans(places):
        changed = x.copy()
        changed[row, begin:end] *= -30.0
        own = np.zeros((B, T), bool)
        own[row, begin:end] = True
        after = np.asarray(read(params, changed, starts))[:B]
        assert (after == before)[~own].all()
        assert (after != before)[own].any(axis=-1).all()


def test_mechanisms_without_packed_rows():
    without = {name for name in CONFIGS if name not in PACKS}
    blocks = ("hybrid", "elastic_memory", "memorizing", "melodi")
    expected = {name for name in CONFIGS if name.startswith(blocks)}
    assert without == {*expected, "sliding_window_sinks"}


@pytest.mark.slow
def test_start_inside_a_chunk_is_refused():
    mechanism, params, x, starts, _, read, _ = case("ttt_linear")
    assert mechanism.packed.chunk == 4
    misplaced = starts.copy()
    misplaced[:B] = make_starts(((0, 8), (0, 5)))
    with pytest.raises(ValueError, match="reset must be where a chunk of 4 starts"):
        mechanism.packed.whole(params, jnp.asarray(x), jnp.asarray(misplaced))
    # Inside jit, where the place is not known, nothing of it passes for a result.
    y = np.asarray(read(params, x, misplaced))
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
def test_kernel_of_a_tpu_sees_a_document_alone(monkeypatch):
    mechanism = build(SlidingWindowConfig(**{**HEADS, "head_dim": 64}, window=100))
    params = mechanism.init_params(jax.random.key(0))
    x = np.random.default_rng(1).standard_normal((1, 256, D)).astype(jnp.bfloat16)
    starts = np.zeros((1, 256), bool)
    starts[0, [70, 200]] = True
    expected = jax.jit(mechanism.packed.whole)(params, x, starts)
    # The branch for TPUs, its kernels interpreted.
    monkeypatch.setattr(
        jax.lax,
        "platform_dependent",
        lambda *args, tpu=None, default, **_: (tpu or default)(*args),
    )
    interpret_attention(monkeypatch)
    found = jax.jit(lambda *given: mechanism.packed.whole(*given))(params, x, starts)
    found, expected = (np.asarray(y, np.float32) for y in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=0.05, atol=0.05)
