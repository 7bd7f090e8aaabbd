"""Products of sorted rows with the matrix of their group."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memjax_kernels._src.grouped_product import grouped_product


def draw(rows, groups, seed=0):
    draws = np.random.default_rng(seed)
    shapes = (rows, 5), (groups, 5, 3), (rows, 3)
    return tuple(draws.standard_normal(shape, np.float32) for shape in shapes)


@jax.jit
def values_and_gradients(x, weights, sizes, cotangent):
    product = functools.partial(grouped_product, sizes=sizes)
    y, pull = jax.vjp(product, x, weights)
    return y, *pull(cotangent)


# Blocks of one row, of some, and of the most.
@pytest.mark.parametrize("rows, groups", [(3, 4), (12, 4), (70, 1)])
@settings(max_examples=15)
@given(data=st.data())
def test_values_and_gradients_are_those_of_one_row_at_a_time(rows, groups, data):
    # Rows of the last group are of none.
    of = st.lists(st.integers(0, groups), min_size=rows, max_size=rows)
    sizes = np.bincount(data.draw(of), minlength=groups + 1)[:groups]
    x, weights, cotangent = draw(rows, groups)
    y, dx, dw = values_and_gradients(x, weights, sizes.astype(np.int32), cotangent)
    expected = np.zeros_like(y), np.zeros_like(x), np.zeros_like(weights)
    for i, e in enumerate(np.repeat(np.arange(groups), sizes)):
        expected[0][i] = x[i] @ weights[e]
        expected[1][i] = weights[e] @ cotangent[i]
        expected[2][e] += np.outer(x[i], cotangent[i])
    for actual, wanted in zip((y, dx, dw), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, atol=2e-5)


def test_a_matrix_without_rows_is_not_read():
    # The program of the test above.
    x, weights, cotangent = draw(12, 4)
    weights[[1, 3]] = np.nan
    sizes = np.array([8, 0, 4, 0], np.int32)
    found = values_and_gradients(x, weights, sizes, cotangent)
    assert all(np.isfinite(x).all() for x in found)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_matrices_are_cast_one_at_a_time(stored):
    x, weights, _ = draw(6, 16)
    sizes = np.zeros(16, np.int32)
    given = x.astype(jnp.bfloat16), weights.astype(jnp.dtype(stored)), sizes
    compiled = jax.jit(grouped_product).lower(*given).compile()
    program = compiled.as_text() or ""
    # What a loop is given. CPUs multiply float32.
    loops = [line for line in program.splitlines() if " while(" in line]
    cast = "bf16[16,5,3]" if stored == "float32" else "f32[16,5,3]"
    assert loops and not any(f" {cast}" in line for line in loops)
    assert compiled(*given).dtype == jnp.bfloat16
