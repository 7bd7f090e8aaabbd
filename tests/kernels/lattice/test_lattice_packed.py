"""Lattice on a TPU for packs of heads: one chunk, and the kernels."""

import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax_kernels import lattice_init_state
from memjax_kernels._src.common import packs, products
from memjax_kernels._src.common.packs import tuned
from memjax_kernels._src.common.packs.chunk_kernels import Chunk
from memjax_kernels._src.common.packs.staggered import staggered
from memjax_kernels._src.lattice import Rule, packed, packed_gradient, pallas_tpu
from memjax_kernels._src.lattice import chunk as one_chunk
from memjax_kernels._src.lattice.xla import lattice_xla
from tests.kernels.distances import close, distances
from tests.kernels.lattice.against_xla import (
    INTERPRETED,
    PLAINLY_INTERPRETED,
    both,
    draw,
    open_state,
    rows,
)

EXACT = functools.partial(products.multiply, dtype=jnp.dtype("float32"))


def pack_heads(x):
    """[P, heads, ., D] -> [P, ., DD]."""
    return jnp.concatenate([x[:, i] for i in range(x.shape[1])], axis=-1)


@pytest.mark.slow
def test_packed_chunk_and_gradient_equal_single_heads():
    variant, number, heads, size, slots, width = "sim", 2, 3, 5, 4, 3
    random = np.random.default_rng(0)

    def normal(*s):
        return jnp.asarray(random.normal(size=(number, heads, *s)), "float32")

    q, k, v = normal(size, slots), normal(size, slots), normal(size, width)
    gamma = jax.nn.sigmoid(normal(size, 1))
    start = normal(slots, width)
    start = start / jnp.linalg.norm(start, axis=-1, keepdims=True)
    d_after, d_y = normal(slots, width), normal(size, width)

    def one_by_one(q, k, v, gamma, start):
        tokens = one_chunk.Tokens(q, k, v, gamma, None)
        return one_chunk.advance(tokens, start, Rule(variant), EXACT)

    @jax.jit
    def pulled(primals, cotangents):
        values, pull = jax.vjp(one_by_one, *primals)
        return values, pull(cotangents)

    cotangents = d_after, d_y
    expected, (d_q, d_k, d_v, d_gamma, d_start) = pulled(
        (q, k, v, gamma, start), cotangents
    )
    options = packed.Options(variant, heads, EXACT)
    wide = pack_heads(jnp.broadcast_to(gamma, q.shape))
    x = Chunk(pack_heads(q), pack_heads(k), pack_heads(v), wide)
    given = x, pack_heads(start)

    def whole(phases):
        function = functools.partial(phases, options=options)
        # Packs one behind the other, as groups of them are in the kernels.
        return jax.jit(lambda *arrays: staggered(function, arrays, number, lag=2))

    after, y = whole(packed.advance)(*given)
    close((after, y), [*map(pack_heads, expected)], 2e-5)
    found = whole(packed_gradient.vjp)(*given, *map(pack_heads, cotangents))
    by_head = found.gates.reshape(number, size, heads, slots).sum(-1)
    actual = *found.tokens, by_head, found.memory
    theirs = pack_heads(d_q), pack_heads(d_k), pack_heads(d_v)
    theirs = *theirs, pack_heads(d_gamma), pack_heads(d_start)
    for mine, other in zip(actual, theirs, strict=True):
        np.testing.assert_allclose(mine, other, atol=3e-4 * (1 + np.abs(other).max()))


def test_each_group_is_its_lag_behind_the_one_before():
    order = []

    def phases(x):
        for phase in "abc":
            order.append(f"{phase}{x[0]}")
            yield
        return 2 * x

    found = staggered(phases, (np.arange(3),), groups=3, lag=2)
    assert list(found) == [0, 2, 4]
    assert order == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]
    order.clear()
    staggered(phases, (np.arange(2),), groups=2, lag=1)
    assert order == ["a0", "b0", "a1", "c0", "b1", "c1"]


def test_sums_over_tokens_are_those_of_float32():
    x = jax.random.normal(jax.random.key(0), (2, 16, 128))
    expected = np.cumsum(np.asarray(x, np.float64), axis=1)
    np.testing.assert_allclose(packed.sum_tokens(x), expected, atol=5e-6)
    later = np.flip(np.cumsum(np.flip(np.asarray(x, np.float64), 1), axis=1), 1)
    np.testing.assert_allclose(packed.sum_tokens(x, reverse=True), later, atol=5e-6)


def test_three_parts_in_bfloat16_are_a_float32():
    x = jax.random.normal(jax.random.key(0), (1000,)) * 1e3
    parts = packs.in_bfloat16(x)
    rounded = [part.astype(jnp.bfloat16).astype(jnp.float32) for part in parts]
    for part, all_digits in zip(parts, rounded, strict=True):
        np.testing.assert_array_equal(part, all_digits)
    whole = sum(rounded)
    np.testing.assert_allclose(whole, x, rtol=2e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "sizes", "places", "resets", "most"),
    [
        # Open chunks; two groups of heads, and several batch elements.
        ("dec", (2, 40, 4, 64, 128, 16), [0, 5], [16, 27], 1),
        ("enc", (4, 40, 2, 64, 64, 16), [0, 5, 10, 15], [16, 27, 0, 39], 8),
    ],
)
def test_values_and_gradients_agree_with_xla(variant, sizes, places, resets, most):
    b, t, h, m, width, c = sizes
    state = open_state(rows(2, b, h, m, width), places, c)
    reset = np.arange(t) == np.array(resets)[:, None]
    arguments = draw(b, t, h, m, width), state, reset, rows(3, b, h, m, width)
    expected = both(lattice_xla, variant, *arguments)
    # The kernels are the same: one size shows that memory is written.
    form = INTERPRETED if variant == "dec" else PLAINLY_INTERPRETED
    with mock.patch.object(tuned, "SIZES", tuned.changed("lattice", packs=most)):
        found = both(form, variant, *arguments)
    close(found, expected, 3e-6)


# Relative errors of the XLA form in bfloat16, in thousandths, for the tokens of the
# test below: of reads and the memory, and of gradients of tokens and the memory.
XLA_ERRORS = 4.45, 2.76, 4.26, 4.91, 5.58, 4.22, 5.40


@pytest.mark.slow
def test_bfloat16_error_is_no_larger_than_xla():
    variant, (b, t, h, d, c) = "enc", (1, 100, 2, 64, 64)
    state = lattice_init_state(b, h, d, d, c)
    low = draw(b, t, h, d, d, jnp.bfloat16)
    high: Any = tuple(x.astype(jnp.float32) for x in low)
    arguments = state, None, state.start
    exact = both(lattice_xla, variant, high, *arguments, in_phase=True)
    # The test above has memory that is not written: here the lighter interpreter.
    kernel = both(PLAINLY_INTERPRETED, variant, low, *arguments, in_phase=True)
    # The open tokens are those given, and have no gradient.
    found = {path: x for path, x in distances(kernel, exact).items() if x}
    for (path, distance), xla in zip(found.items(), XLA_ERRORS, strict=True):
        assert distance <= 1.05e-3 * xla + 1e-4, (path, distance, xla)
    assert kernel[0][0].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("size", "heads", "slots", "width", "fitting"),
    [
        (64, 12, 64, 64, 2),
        (16, 4, 32, 64, 4),
        (64, 3, 128, 256, 1),
        (64, 3, 64, 64, 0),
        (16, 2, 64, 40, 0),
    ],
)
def test_heads_of_a_pack_fill_the_lanes(size, heads, slots, width, fitting):
    assert pallas_tpu._op.heads(heads, size, slots, width) == fitting


def test_channels_are_summed_in_all_lanes_of_their_head():
    x = jax.random.normal(jax.random.key(0), (2, 8, 128))
    found = packs.sum_heads(x, 2).reshape(2, 8, 2, 64)
    expected = np.asarray(x, np.float64).reshape(2, 8, 2, 64).sum(-1, keepdims=True)
    np.testing.assert_allclose(found, expected + 0 * found, atol=1e-5)
