"""Products of matrices: rounding of operands and sums."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from memjax_kernels._src.common.products import multiplier, multiply, operand_dtype

F32 = jnp.dtype(jnp.float32)
NUMPY = {
    "nt": lambda x, y: x @ np.swapaxes(y, -1, -2),
    "nn": lambda x, y: x @ y,
    "tn": lambda x, y: np.swapaxes(x, -1, -2) @ y,
}
SHAPES = {
    "nt": ((5, 300), (4, 300)),
    "nn": ((5, 300), (300, 4)),
    "tn": ((300, 5), (300, 4)),
}


def operands(form):
    """Operands whose exact product is far from what bfloat16 sums would give."""
    random = np.random.default_rng(0)
    return tuple(random.normal(1.0, 0.1, (2, *shape)) for shape in SHAPES[form])


@pytest.mark.parametrize("form", NUMPY)
def test_float32_products_round_no_operand_to_bfloat16(form):
    x, y = operands(form)
    product = multiply(jnp.asarray(x), jnp.asarray(y), form, F32)
    np.testing.assert_allclose(product, NUMPY[form](x, y), rtol=1e-6)


@pytest.mark.parametrize("form", NUMPY)
def test_bfloat16_products_are_summed_in_float32(form):
    x, y = operands(form)
    rounded = [a.astype(ml_dtypes.bfloat16).astype(np.float64) for a in (x, y)]
    product = multiply(jnp.asarray(x), jnp.asarray(y), form, jnp.dtype(jnp.bfloat16))
    assert product.dtype == jnp.float32
    np.testing.assert_allclose(product, NUMPY[form](*rounded), rtol=1e-6)
    # The operands were rounded, as asked.
    assert np.abs(np.asarray(product) - NUMPY[form](x, y)).max() > 1e-3


@pytest.mark.parametrize("form", NUMPY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_products_of_the_same_dtype(form, dtype):
    x, y = (jnp.asarray(a, jnp.float32) for a in operands(form))
    product = multiplier(jnp.dtype(dtype))
    ct = jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, 4)), jnp.float32)
    found = jax.vjp(lambda x, y: product(x, y, form), x, y)[1](ct)

    rounded = [jnp.asarray(a, dtype).astype(jnp.float32) for a in (x, y, ct)]
    exact = jax.vjp(lambda x, y: multiply(x, y, form, F32), *rounded[:2])[1]
    for gradient, expected in zip(found, exact(rounded[2]), strict=True):
        assert gradient.dtype == jnp.float32
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


def test_operands_are_bfloat16_only_where_all_tokens_are():
    low, high = jnp.zeros(1, jnp.bfloat16), jnp.zeros(1, jnp.float32)
    assert operand_dtype(low, None, low) == jnp.bfloat16
    assert operand_dtype(low, high) == jnp.float32
