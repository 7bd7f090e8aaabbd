"""Products with weights that stay as a file has them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from memjax_kernels._src import stored_product as module
from memjax_kernels._src.stored_product import (
    Stored,
    store,
    stored_numbers,
    stored_product,
    stored_rows,
)


def half(x):
    """Rounded to float16, as scales of GGUF are."""
    return np.asarray(x, np.float16).astype(np.float32)[..., None]


def q8_0(groups):
    scale = np.abs(groups).max(-1) / 127
    return np.rint(groups / scale[..., None]) * half(scale)


def q4_1(groups):
    low = groups.min(-1)
    scale = (groups.max(-1) - low) / 15
    values = np.floor((groups - low[..., None]) / scale[..., None] + 0.5)
    return np.minimum(values, 15) * half(scale) + half(low)


def q4_0(groups):
    at = np.abs(groups).argmax(-1)[..., None]
    scale = np.take_along_axis(groups, at, -1)[..., 0] / -8
    values = np.floor(groups / scale[..., None] + 8.5)
    return (np.minimum(values, 15) - 8) * half(scale)


#: By what llama.cpp's quantization makes of numbers: the dtype that holds them.
FORMS = {
    "uint8": (q4_0, q4_1),
    "int8": (q8_0,),
    "uint16": (lambda x: x.astype(ml_dtypes.bfloat16),),
    "int16": (lambda x: x.astype(np.float16),),
}
CASES = [(dtype, form) for dtype, forms in FORMS.items() for form in forms]


def matrix(form, inputs, outputs, seed=0):
    """[I, O] of a form, with a block of zeros."""
    groups = np.random.default_rng(seed).standard_normal((outputs, inputs // 32, 32))
    found = form(groups.astype(np.float32)).astype(np.float32)
    found[outputs // 2, 0] = 0
    return found.reshape(outputs, inputs).T


@pytest.mark.parametrize(("dtype", "form"), CASES)
@pytest.mark.parametrize("numbers", [1 << 20, 700])
def test_products_rows_and_numbers_are_those_of_the_matrix(
    dtype, form, numbers, monkeypatch
):
    monkeypatch.setattr(module, "NUMBERS", numbers)
    w = matrix(form, 64, 37)
    stored = store(w)
    assert isinstance(stored, Stored)
    assert stored.values.dtype == dtype and (len(stored.values) == 1) == (numbers > 700)
    assert (stored.size, stored.outputs, stored.shape) == (w.size, 37, w.shape)
    x = np.random.default_rng(1).standard_normal((2, 3, 64), np.float32)
    y = jax.jit(stored_product)(x, stored)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    np.testing.assert_allclose(y, exact, atol=1e-5)
    # One row takes another form.
    y = jax.jit(stored_product)(x[:1, :1], stored)
    np.testing.assert_allclose(y, exact[:1, :1], atol=1e-5)
    at = jnp.array([[0, 36], [18, 37], [-1, 5]])
    rows = np.array(jax.jit(stored_rows)(stored, at))
    assert np.isnan(rows[[1, 2], [1, 0]]).all()
    rows[[1, 2], [1, 0]] = 0
    expected = w.T[np.clip(at, 0, 36)]
    expected[[1, 2], [1, 0]] = 0
    np.testing.assert_allclose(rows, expected, atol=1e-6)
    places = np.arange(0, w.size, 5)
    np.testing.assert_allclose(
        stored_numbers(stored, places), w.reshape(-1)[places], atol=1e-6
    )


def test_several_axes_and_a_table():
    w = matrix(q8_0, 64, 12)
    x = np.random.default_rng(1).standard_normal((2, 64), np.float32)
    for shaped, axes in ((w.reshape(2, 32, 3, 4), 2), (w.T, -1)):
        stored = store(shaped, axes)
        assert stored.shape == shaped.shape
        y = stored_product(jnp.asarray(x), stored)
        np.testing.assert_allclose(y, x @ w, atol=1e-5)
        places = np.arange(w.size)
        numbers = stored_numbers(stored, places)
        np.testing.assert_allclose(numbers, shaped.reshape(-1), atol=1e-6)


def test_matrix_of_more_digits_stays():
    w = np.random.default_rng(0).standard_normal((64, 8), np.float32)
    assert store(w) is w
    # One number of one block has more digits than the others.
    low = matrix(q8_0, 64, 8).copy()
    low[40, 7] += 1e-6
    assert store(low) is low
    # Inputs that fill no blocks have 16 bits.
    narrow = store(w[:33].astype(np.float16).astype(np.float32))
    assert narrow.values.dtype == np.int16
    assert "for generation alone" in str(
        pytest.raises(AttributeError, lambda: narrow.astype(np.float32)).value
    )


def test_loop_widens_one_matrix_at_a_time():
    pair = store(matrix(q4_1, 256, 512)), store(matrix(q4_1, 512, 256))

    @functools.partial(jax.jit, static_argnums=2)
    def run(x, pairs, count):
        def body(_, x):
            for up, down in pairs:
                x += 1e-3 * stored_product(stored_product(x, up), down)
            return x

        return jax.lax.fori_loop(0, count, body, x)

    x = jnp.ones((1, 256))
    memory: Any = run.lower(x, (pair,) * 4, 20).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * sum(w.size for w in pair)
