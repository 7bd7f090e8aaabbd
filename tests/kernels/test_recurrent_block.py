"""The short convolution and the gated norm: formulas, kernels, refused arguments."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from memjax_kernels import gated_norm, l2_normalize, short_convolution
from memjax_kernels._src.common.packs import tuned
from memjax_kernels._src.recurrent_block import (
    convolution_tpu,
    norms_tpu,
    xla,
)
from tests.kernels.distances import close
from tests.kernels.on_tpu import INTERPRETER, compiled_for_two, needs_libtpu

CONVOLUTION = functools.partial(
    convolution_tpu.short_convolution_tpu, interpret=INTERPRETER
)
# Faster, for what does not depend on when memory is written.
LIGHTER = functools.partial(CONVOLUTION, interpret=True)
NORM = functools.partial(norms_tpu.gated_norm_tpu, interpret=INTERPRETER)
UNIT = functools.partial(norms_tpu.l2_normalize_tpu, interpret=INTERPRETER)
NORM_XLA = functools.partial(xla.gated_norm, epsilon=1e-5)
# bfloat16 has 8 bits.
NEAR = 6e-3


def tokens(seed, *shapes, dtype=jnp.bfloat16):
    """Random arrays whose values bfloat16 has."""
    draws = np.random.default_rng(seed)
    found = [draws.standard_normal(shape) for shape in shapes]
    return [jnp.asarray(x, jnp.bfloat16).astype(dtype) for x in found]


def convolution_inputs(seed, batch, time, heads, width, dtype=jnp.bfloat16):
    x, filters, before = tokens(
        seed,
        (batch, time, heads, width),
        (4, heads, width),
        (batch, 3, heads, width),
        dtype=dtype,
    )
    return x, filters.astype(jnp.float32), before.astype(jnp.float32)


def positions_of(time, begins):
    """Positions in documents that begin at 0 and where `begins` says."""
    at = np.arange(time)
    starts = np.max([np.where(at >= begin, begin, 0) for begin in begins], axis=0)
    return jnp.asarray(at - starts, jnp.int32)[None]


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(form, weight, *inputs):
    y, pull = jax.vjp(lambda *x: form(*x).astype(jnp.float32), *inputs)
    return y, pull(weight)


@pytest.mark.parametrize("taps", [1, 4])
def test_the_convolution_is_the_sum_over_taps_with_unit_norm(taps):
    x, filters, before = convolution_inputs(0, 2, 5, 2, 3, dtype=jnp.float32)
    filters, before = filters[4 - taps :], before[:, 4 - taps :]
    found = jax.jit(short_convolution)(x, filters, before)
    inputs = np.concatenate([before, x], axis=1)
    for t in range(5):
        z = sum(inputs[:, t + w] * np.asarray(filters[w]) for w in range(taps))
        z = z / (1 + np.exp(-z))
        expected = z / np.sqrt((z**2).sum(axis=-1, keepdims=True) + 1e-6)
        np.testing.assert_allclose(found[:, t], expected, rtol=1e-5, atol=1e-6)


def test_convolution_does_not_cross_documents():
    x, filters, before = convolution_inputs(1, 1, 9, 2, 3, dtype=jnp.float32)
    run, x = jax.jit(short_convolution), np.asarray(x)
    packed = run(x, filters, before, positions_of(9, [3, 6]))
    for begin, end in ((0, 3), (3, 6), (6, 9)):
        alone = run(x[:, begin:end], filters, np.zeros_like(before))
        np.testing.assert_allclose(packed[:, begin:end], alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", [CONVOLUTION, xla.short_convolution])
def test_convolution_is_not_reached_by_nan_of_other_documents(form):
    """Neither reads nor gradients; what comes before the first one is another too."""
    x, filters, before = convolution_inputs(4, 1, 32, 2, 64)
    (weight,), positions = tokens(9, x.shape), positions_of(32, [0, 5, 17])

    def run(x, before, weight):
        def convolve(*given):
            return form(*given, positions)

        return with_gradients(convolve, weight.astype(jnp.float32), x, filters, before)

    y, (d_x, *others) = run(x, jnp.zeros_like(before), weight)
    found, (of_x, *rest) = run(x, jnp.full_like(before, jnp.nan), weight)
    for one, other in zip((found, of_x, *rest), (y, d_x, *others), strict=True):
        np.testing.assert_array_equal(one, other)
    # NaN of a document in the middle, in its tokens and then in its cotangents.
    spoilt = [z.at[:, 5:17].set(jnp.nan) for z in (x, weight)]
    for given in ((spoilt[0], weight), (x, spoilt[1])):
        found, (of_x, *_) = run(given[0], before, given[1])
        for one, other in ((found, y), (of_x, d_x)):
            for part in np.s_[:, :5], np.s_[:, 17:]:
                np.testing.assert_array_equal(one[part], other[part])


def test_the_gated_norm_is_its_equation():
    y, gate, (scale,) = *tokens(2, (2, 3, 2, 4), (2, 3, 2, 4)), tokens(3, (4,))
    y, gate, scale = (np.asarray(x, np.float64) for x in (y, gate, scale))
    rms = np.sqrt((y**2).mean(axis=-1, keepdims=True) + 1e-5)
    expected = y / rms * scale * np.asarray(jax.nn.gelu(gate))
    y, gate, scale = (jnp.asarray(x, jnp.float32) for x in (y, gate, scale))
    found = gated_norm(y, gate, scale, 1e-5)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("time", "heads", "packed"), [(128, (16, 32), True), (48, (3, 128), False)]
)
def test_kernels_equal_xla(time, heads, packed, monkeypatch):
    """Two blocks each of two tiles, of tokens and of lanes; and an odd one of each.

    The packed texts have unit norm, the others a bias and no norm.
    """
    sizes = {"tokens": 64, "lanes": 256, "rows": 32, "convolved_rows": 32}
    monkeypatch.setattr(tuned, "SIZES", tuned.changed("tiles", **sizes))
    x, filters, before = convolution_inputs(time, 2, time, *heads)
    positions = positions_of(time, [time // 3, time // 2 + 5]) if packed else None
    positions = None if positions is None else jnp.repeat(positions, 2, axis=0)
    inputs, (weight,) = (x, filters, before), tokens(9, x.shape, dtype=jnp.float32)

    def run(form, *x):
        return with_gradients(form, weight, *x)

    biases = [] if packed else tokens(8, heads, dtype=jnp.float32)

    def convolve(form):
        def convolved(x, filters, before, *bias):
            return form(x, filters, before, positions, *bias, unit_norm=packed)

        return run(convolved, *inputs, *biases)

    # Memory is written alike in both: one shows that it is.
    lighter = {} if packed else {"interpret": True}
    kernel = functools.partial(CONVOLUTION, **lighter)
    (y, found), (expected, others) = map(convolve, (kernel, xla.short_convolution))
    close(y, expected, NEAR)
    # The sums over all tokens are of float32 numbers in both.
    for one, other, near in zip(found, others, (NEAR, 1e-5, NEAR, 1e-5), strict=False):
        close(one, other, near)

    y, gate, (scale,) = *tokens(time, x.shape, x.shape), tokens(7, x.shape[-1:])
    inputs = (y, gate, scale.astype(jnp.float32))
    norm = functools.partial(NORM, epsilon=1e-5, **lighter)
    close(run(norm, *inputs), run(NORM_XLA, *inputs), NEAR)
    unit = functools.partial(UNIT, norm=3.0, **lighter)
    close(run(unit, y), run(functools.partial(l2_normalize, norm=3.0), y), NEAR)


def test_heads_have_requested_norm():
    (y,) = tokens(3, (2, 5, 3, 7), dtype=jnp.float32)
    norms = jnp.linalg.norm(l2_normalize(y, norm=3.0), axis=-1)
    np.testing.assert_allclose(norms, 3.0, rtol=1e-5)


@pytest.mark.parametrize("taps", [1, 4])
def test_the_kernel_has_one_tap_and_gradients_in_the_dtypes_given(taps):
    x, filters, before = convolution_inputs(10, 1, 16, 2, 64)
    given = x, filters[4 - taps :].astype(jnp.bfloat16), before[:, 4 - taps :]

    def gradients(x, filters, before, bias):
        def convolve(x, filters, before, bias):
            return CONVOLUTION(x, filters, before, None, bias, unit_norm=False)

        return jax.vjp(convolve, x, filters, before, bias)[1](x)

    found = jax.eval_shape(gradients, *given, jnp.ones((2, 64)))
    assert [y.dtype.name for y in found] == ["bfloat16"] * 2 + ["float32"] * 2


@pytest.mark.slow
def test_the_derivative_of_large_inputs_and_an_exact_bias():
    x = jnp.ones((1, 16, 1, 128), jnp.bfloat16)
    before, bias = jnp.zeros((1, 3, 1, 128)), jnp.full((1, 128), 100.3)

    @functools.partial(jax.jit, static_argnums=0)
    def both(form, filters, bias, x):
        def convolve(x):
            return form(x, filters, before, None, bias, unit_norm=False)

        y, pull = jax.vjp(convolve, x)
        return y, pull(jnp.ones_like(y))

    large = jnp.full((4, 1, 128), 2.0**28), 0 * bias, x
    near = jnp.full((4, 1, 128), 25.0, jnp.bfloat16), bias, -x
    for given in (large, near):
        close(both(CONVOLUTION, *given), both(xla.short_convolution, *given), 3e-2)


@pytest.mark.slow
def test_convolution_is_split_invariant():
    x, filters, before = convolution_inputs(4, 1, 96, 2, 64)
    convolve, x = jax.jit(LIGHTER), np.asarray(x)
    whole = convolve(x, filters, before, None)
    first = convolve(x[:, :32], filters, before, None)
    rest = convolve(x[:, 32:], filters, x[:, 29:32].astype(np.float32), None)
    np.testing.assert_array_equal(whole, np.concatenate([first, rest], axis=1))


@pytest.mark.slow
def test_a_gradient_of_the_gradient_is_that_of_xla():
    x, filters, before = convolution_inputs(5, 1, 16, 2, 64)

    def twice(form):
        once = jax.grad(
            lambda f: (form(x, f, before, None) ** 2 * x).astype(jnp.float32).sum()
        )
        return jax.jit(jax.grad(lambda f: (once(f) ** 2).sum()))(filters)

    close(twice(LIGHTER), twice(xla.short_convolution), 2e-2)


X, FILTERS, BEFORE = (jnp.ones(s) for s in [(1, 5, 2, 8), (4, 2, 8), (1, 3, 2, 8)])


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        (short_convolution, (X, FILTERS[:, :1], BEFORE), "filters must have shape"),
        (
            short_convolution,
            (X, FILTERS, BEFORE[:, :2]),
            r"before must have shape \(1, 3, 2, 8\), got \(1, 2, 2, 8\)",
        ),
        (
            short_convolution,
            (X, FILTERS, BEFORE, jnp.ones((1, 6), int)),
            r"positions must have shape \(1, 5\), got \(1, 6\)",
        ),
        (gated_norm, (X, X, jnp.ones(7), 1e-5), "scale must have shape"),
        (
            functools.partial(gated_norm, implementation="pallas_tpu"),
            (X, X, jnp.ones(8), 1e-5),
            "pallas_tpu' of gated_norm cannot run here",
        ),
    ],
)
def test_bad_input_is_refused(op, arguments, message):
    # Without the annotations' own check.
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(op)(*arguments)


@pytest.mark.parametrize(
    ("sizes", "dtype", "reason"),
    [
        ((32, 2, 64), jnp.float32, "x must be bfloat16, got float32"),
        ((40, 2, 64), jnp.bfloat16, "40 tokens are no multiple of 16"),
        ((32, 3, 64), jnp.bfloat16, "3 heads of 64 do not fill 128 lanes"),
        ((32, 2, 192), jnp.bfloat16, "2 heads of 192 do not fill 128 lanes"),
    ],
)
def test_unsupported_reasons(sizes, dtype, reason):
    x, filters = jax.ShapeDtypeStruct((2, *sizes), dtype), jnp.ones((4, 1, 1))
    assert convolution_tpu.unsupported(x, filters) == reason


def test_filters_and_a_bias_have_eight_rows():
    x = jax.ShapeDtypeStruct((2, 32, 2, 64), jnp.bfloat16)
    filters, bias = jnp.ones((8, 2, 64)), jnp.ones((2, 64))
    assert convolution_tpu.unsupported(x, filters) == ""
    reason = convolution_tpu.unsupported(x, filters, bias)
    assert reason == "filters of 8 taps and a bias are wider than 8"


@needs_libtpu
def test_gradients_compile_on_two_devices_without_exchange_of_tokens():
    chip, axis = "v5e:2x2", "tensor"
    x, filters, before = convolution_inputs(6, 2, 64, 4, 64)
    y, scale = tokens(7, x.shape)[0], jnp.ones(64)

    def loss(x, y, filters, before, scale):
        q = short_convolution(x, filters, before)
        reads = gated_norm(l2_normalize(q), y, scale, 1e-5)
        return reads.astype(jnp.float32).sum()

    spec = P(None, None, axis)
    specs = [spec, spec, P(*spec[1:]), spec, P()]
    gradient = jax.grad(loss, (0, 1, 2, 3, 4))
    text = compiled_for_two(chip, gradient, (x, y, filters, before, scale), axis, specs)
    for kernel in ("short_convolution", "gated_norm", "l2_normalize"):
        assert f"{kernel}_backward" in text
    assert "all-gather" not in text and "all-to-all" not in text
