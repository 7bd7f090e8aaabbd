"""Attention to a cache: the formula, the kernel, refused arguments."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax_kernels import cached_attention
from memjax_kernels._src.cached_attention import attend, pallas_tpu
from tests.kernels.on_tpu import INTERPRETER, compiled_for_two, needs_libtpu

KERNEL = functools.partial(pallas_tpu.attend_tpu, interpret=INTERPRETER)


def draw(seed, slots, heads, groups, width, dtype=jnp.float32, queries=2):
    """Queries, a cache and what they see of it, for two batch elements."""
    draws = np.random.default_rng(seed)
    q = draws.standard_normal((2, queries, heads, width))
    k, v = draws.standard_normal((2, 2, slots, groups * width))
    seen = draws.uniform(size=(2, queries, slots)) < 0.4
    # The first sees nothing of the second half, and the second its last slot.
    seen[0, :, slots // 2 :], seen[0, :, 0], seen[1, :, -1] = False, True, True
    return *(jnp.asarray(x, dtype) for x in (q, k, v)), jnp.asarray(seen)


def test_equals_grouped_softmax_attention():
    q, k, v, seen = draw(0, 9, 6, 2, 4)
    found, mass = jax.jit(cached_attention)(q, k, v, seen)
    q, k, v, seen = (np.asarray(x, np.float64) for x in (q, k, v, seen))
    for b, n, h in np.ndindex(2, 2, 6):
        own = slice(4 * (h // 3), 4 * (h // 3) + 4)
        scores = np.exp(k[b, :, own] @ q[b, n, h] / 2) * seen[b, n]
        expected = scores @ v[b, :, own] / scores.sum()
        np.testing.assert_allclose(found[b, n, h], expected, atol=1e-5)
        np.testing.assert_allclose(mass[b, n, h], np.log(scores.sum()), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slots", "sizes", "queries"),
    # A block, a part of one, and several with a part.
    [(128, (2, 2, 128), 1), (700, (9, 3, 64), 3), (2100, (20, 4, 32), 2)],
)
def test_kernel_equals_xla(slots, sizes, queries):
    q, k, v, seen = draw(slots, slots, *sizes, queries=queries)
    assert pallas_tpu.unsupported(q, k) == ""
    found, expected = jax.jit(KERNEL)(q, k, v, seen), jax.jit(attend)(q, k, v, seen)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("form", [attend, pytest.param(KERNEL, marks=pytest.mark.slow)])
def test_fully_masked_query_has_no_mass(form):
    q, k, v, seen = draw(1, 128, 2, 2, 64)
    # One beside another that sees something, and two alone.
    nothing = np.array(seen)
    nothing[0, 1] = nothing[1] = False
    found, mass = map(np.asarray, jax.jit(form)(q, k, v, nothing))
    assert np.isfinite(found).all() and np.isfinite(mass).all()
    assert (mass[0, 0] > -10).all()
    assert (mass[0, 1] <= -1e30).all() and (mass[1] <= -1e30).all()


@pytest.mark.slow
def test_bfloat16_error_is_no_larger_than_xla():
    q, k, v, seen = draw(2, 256, 4, 2, 64, jnp.bfloat16)
    single = operator.methodcaller("astype", jnp.float32)
    exact, exact_mass = jax.jit(attend)(single(q), single(k), single(v), seen)
    found, mass = jax.jit(KERNEL)(q, k, v, seen)
    assert found.dtype == jnp.bfloat16 and mass.dtype == jnp.float32
    np.testing.assert_allclose(mass, exact_mass, atol=0.03)
    np.testing.assert_allclose(found.astype(jnp.float32), exact, atol=0.03)


@pytest.mark.slow
def test_gradients_of_both_modes_are_those_of_xla():
    arrays = draw(3, 128, 2, 2, 64)

    def some(form):
        def squares(*x):
            y, mass = form(*x, arrays[3])
            return (y**2).sum() + (mass**2).sum()

        return squares

    # Both modes, in one program.
    def gradients(form):
        modes = jax.grad, jax.jacfwd
        return jax.jit(lambda *x: [mode(some(form))(*x) for mode in modes])

    pairs = zip(
        gradients(cached_attention)(*arrays[:3]),
        gradients(attend)(*arrays[:3]),
        strict=True,
    )
    for found, expected in pairs:
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow  # Fast tests are also run with all annotations checked.
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": jnp.ones((2, 9, 6))}, "values must have shape"),
        ({"keys": jnp.ones((2, 9, 12)), "values": jnp.ones((2, 9, 12))}, "as many"),
        ({"seen": jnp.ones((2, 2, 9))}, r"seen must be bool .*\[2, 2, 9\]"),
        ({"implementation": "pallas_tpu"}, "it needs a tpu"),
    ],
)
def test_bad_input_is_refused(change, message):
    names = ("q", "keys", "values", "seen")
    given = dict(zip(names, draw(0, 9, 4, 2, 4), strict=True))
    with pytest.raises(ValueError, match=message):
        cached_attention(**(given | change))


@pytest.mark.parametrize(
    ("sizes", "dtype", "reason"),
    [
        ((100, 2, 2, 64), jnp.float32, "100 slots are less than a block of 128"),
        ((128, 2, 2, 64), jnp.float16, "q must be float32 or bfloat16"),
        ((128, 40, 40, 128), jnp.float32, "more than 2097152"),
    ],
)
def test_unsupported_reasons(sizes, dtype, reason):
    slots, heads, groups, width = sizes
    q, k, _, _ = draw(0, slots, heads, groups, width, dtype)
    assert reason in pallas_tpu.unsupported(q, k)


@needs_libtpu
def test_it_compiles_divided_along_the_batch():
    text = compiled_for_two(
        "v6e:2x2", cached_attention, draw(0, 1024, 12, 4, 64, jnp.bfloat16)
    )
    assert "cached_attention" in text and "all-gather" not in text
