"""Scores of keys by all queries: the formula, the kernel, refused arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from memjax_kernels import sigmoid_scores
from memjax_kernels._src.sigmoid_scores import pallas_tpu, xla
from tests.kernels.on_tpu import INTERPRETER, compiled_for_two, needs_libtpu

KERNEL = functools.partial(pallas_tpu.sum_tanh_tpu, interpret=INTERPRETER)
LIGHTER = {"interpret": True}


def draw(seed, queries, keys, width, dtype=jnp.float32):
    """Queries, of which some count, and keys, for two batch elements."""
    draws = np.random.default_rng(seed)
    q = draws.standard_normal((2, queries, width))
    k = draws.standard_normal((2, keys, width))
    mask = draws.uniform(size=(2, queries)) < 0.7
    return jnp.asarray(q, dtype), jnp.asarray(mask), jnp.asarray(k, dtype)


@pytest.mark.parametrize("keys", [5, 1500])
def test_mean_of_sigmoids_over_masked_queries(keys):
    q, mask, k = map(np.array, draw(0, 7, keys, 3))
    mask[1] = False
    found = np.asarray(jax.jit(sigmoid_scores)(q, mask, k))
    products = q[0][mask[0]] @ k[0].T
    expected = (1 / (1 + np.exp(-products))).mean(axis=0)
    np.testing.assert_allclose(found[0], expected, atol=1e-6)
    assert not found[1].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("queries", "keys", "width"), [(1, 2049, 16), (70, 1, 256), (2100, 300, 256)]
)
def test_kernel_equals_xla(queries, keys, width):
    q, _, k = draw(queries, queries, keys, width)
    q = np.asarray(q) / np.float32(width**0.5)
    # One size, of several blocks, shows that memory is written.
    kernel = functools.partial(KERNEL, **({} if queries == 2100 else LIGHTER))
    found, expected = (jax.jit(form)(q, k) for form in (kernel, xla.sum_tanh))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-4)


@pytest.mark.slow
def test_bfloat16_keys_have_float32_sums():
    q, _, k = draw(1, 600, 300, 64, jnp.bfloat16)
    found = jax.jit(functools.partial(KERNEL, **LIGHTER))(q, k)
    assert found.dtype == jnp.float32
    expected = jax.jit(xla.sum_tanh)(*(np.asarray(x, np.float32) for x in (q, k)))
    np.testing.assert_allclose(found, expected, atol=2e-3)


@pytest.mark.slow  # Fast tests are also run with all annotations checked.
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": jnp.ones((2, 5, 4))}, "keys must have shape"),
        ({"query_mask": jnp.ones((2, 7))}, r"query_mask must be bool .*\[2, 7\]"),
        ({"implementation": "pallas_tpu"}, "it needs a tpu"),
    ],
)
def test_bad_input_is_refused(change, message):
    q, mask, k = draw(0, 7, 5, 3)
    with pytest.raises(ValueError, match=message):
        sigmoid_scores(**({"queries": q, "query_mask": mask, "keys": k} | change))


def test_unsupported_reasons():
    def like(dtype, width):
        return jax.ShapeDtypeStruct((2, 5, width), dtype)

    assert pallas_tpu.unsupported(like(jnp.float32, 512)) == ""
    assert "wider than 512" in pallas_tpu.unsupported(like(jnp.float32, 513))
    assert "must be float32" in pallas_tpu.unsupported(like(jnp.float16, 64))


@needs_libtpu
def test_it_compiles_divided_along_the_batch():
    text = compiled_for_two("v6e:2x2", sigmoid_scores, draw(0, 600, 3000, 256))
    assert "sum_tanh" in text and "all-gather" not in text


@needs_libtpu
def test_each_device_searches_its_own_rows():
    specs = [P(), P(), P(None, "tensor")]
    given = ("v5e:2x2", sigmoid_scores, draw(0, 600, 3000, 256), "tensor", specs)
    text = compiled_for_two(*given)
    assert "f32[2,1,1500]" in text and "all-gather" not in text
