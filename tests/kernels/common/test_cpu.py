"""CPU forms of products and broadcasts: values and gradients of the plain form."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax_kernels._src.common.cpu import (
    computed_once,
    scale_channels,
    scale_rows,
    weigh,
)

SHAPES = [(7,), (3, 5), (2, 11, 3, 6)]


def draws(*shapes):
    random = np.random.default_rng(0)
    return [random.standard_normal(shape, np.float32) for shape in shapes]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("each", ["channel", "row"])
def test_scaling_is_a_product_with_its_gradients(shape, each):
    scale_shape = shape[-1:] if each == "channel" else (*shape[:-1], 1)
    x, g, scale = draws(shape, shape, scale_shape)
    function = scale_channels if each == "channel" else scale_rows

    @jax.jit
    def run(g, *given):
        y, pull = jax.vjp(function, *given)
        return y, *pull(g)

    y, by_x, by_scale = run(g, x, scale)
    np.testing.assert_array_equal(y, np.asarray(x) * np.asarray(scale))
    axes = tuple(range(len(shape) - 1)) if each == "channel" else (-1,)
    products = np.asarray(x, np.float64) * np.asarray(g, np.float64)
    sums = products.sum(axis=axes, keepdims=each == "row")
    np.testing.assert_array_equal(by_x, np.asarray(g) * np.asarray(scale))
    np.testing.assert_allclose(by_scale, sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scaling_keeps_the_dtype(dtype):
    x, scale, row = (jnp.asarray(a, dtype) for a in draws((4, 6), (6,), (4, 1)))
    chex.assert_type([scale_channels(x, scale), scale_rows(x, row)], dtype)


def test_product_with_identity_is_exact():
    angles = np.arange(1000.0)[:, None] * np.linspace(1e-4, 1, 33)[None]
    angles = np.cos(angles).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(computed_once)(angles), angles)


@pytest.mark.parametrize("function", [scale_channels, scale_rows, computed_once])
def test_other_platforms_lower_the_plain_form(function):
    arguments = draws((4, 6), (6,) if function is scale_channels else (4, 1))
    arguments = arguments[: 1 if function is computed_once else 2]
    traced = jax.jit(function).trace(*arguments)

    def text(platform):
        return traced.lower(lowering_platforms=(platform,)).as_text()

    assert "dot_general" in text("cpu")
    assert "dot_general" not in text("tpu")
    assert "dot_general" not in text("cuda")


@pytest.mark.parametrize("shape", [*SHAPES, (0, 4, 6)])
def test_weighing_is_a_product_with_its_gradients(shape):
    x, weight, g = draws(shape, (shape[-1], 8), (*shape[:-1], 8))

    def run(product):
        y, pull = jax.vjp(product, x, weight)
        return y, *pull(g)

    chex.assert_trees_all_close(run(weigh), run(jnp.matmul), rtol=1e-5, atol=1e-6)
    assert weigh(jnp.bfloat16(x), jnp.bfloat16(weight), jnp.float32).dtype == g.dtype


def test_weights_of_several_axes_have_gradients_without_a_transpose():
    x, weight, g = draws((2, 16, 6), (6, 8), (2, 16, 8))
    traced = jax.jit(lambda *a: jax.vjp(weigh, *a[:2])[1](a[2])[1]).trace(x, weight, g)
    program = traced.lower().compile().as_text() or ""
    assert " transpose(" not in program and " copy(" not in program
    assert "reshape" not in traced.lower(lowering_platforms=("tpu",)).as_text()
