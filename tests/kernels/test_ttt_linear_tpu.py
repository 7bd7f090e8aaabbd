"""The TPU kernels of TTT-linear: interpreted, and compiled without a TPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from memjax_kernels import TTTLinearState, ttt_linear, ttt_linear_state
from memjax_kernels._src.common.packs import tuned
from memjax_kernels._src.ttt_linear import pallas_tpu
from memjax_kernels._src.ttt_linear.pallas_tpu import ttt_linear_tpu, unsupported
from memjax_kernels._src.ttt_linear.segment import in_chunks
from memjax_kernels._src.ttt_linear.state import TTTLinearTokens
from memjax_kernels._src.ttt_linear.xla import ttt_linear_xla
from tests.kernels.distances import close, distances
from tests.kernels.on_tpu import INTERPRETER, compiled_for_two, needs_libtpu

C = 16


def draw(batch, time, heads, width, dtype=jnp.float32, seed=0) -> Any:
    """Tokens, rates, and layer norm."""
    draws = np.random.default_rng(seed)

    def normal(*shape):
        return draws.standard_normal(shape, np.float32)

    q, k, v = (normal(batch, time, heads, width) for _ in range(3))
    tokens = (jnp.asarray(x, dtype) for x in (q, k / np.sqrt(width), v))
    rates = 0.1 * draws.random((batch, time, heads), np.float32)
    norm = 1 + 0.2 * normal(heads, width), 0.2 * normal(heads, width)
    return *tokens, *map(jnp.asarray, (rates, *norm))


def layer(seed, batch, heads, width) -> Any:
    draws = np.random.default_rng(seed)
    shapes = (batch, heads, width, width), (batch, heads, width)
    return [jnp.asarray(0.1 * draws.standard_normal(s, np.float32)) for s in shapes]


@functools.partial(jax.jit, static_argnums=0)
def both(form, tokens: Any, before: Any, empty: Any, places, opened, reset):
    """Results, and gradients of everything for random cotangents."""

    def forward(tokens, before, opened, empty):
        state = None
        if places is not None:
            here = jnp.arange(C)[None] < places[:, None]
            opened = jax.tree.map(
                lambda x: x * here.reshape(*here[:, None].shape, *[1] * (x.ndim - 3)),
                opened,
            )
            weights, bias = before
            state = TTTLinearState(weights, bias, opened, places, C)
        weights, bias = before if state is None else empty
        given: Any = (*tokens, state, reset, ttt_linear_state(weights, bias, C))
        after, y = in_chunks(form, *given)
        return y, after.weights, after.bias, after.tokens

    values, back = jax.vjp(forward, tokens, before, opened, empty)
    draws = np.random.default_rng(3)
    return values, back(
        jax.tree.map(lambda x: draws.standard_normal(x.shape).astype(x.dtype), values)
    )


def open_tokens(batch, heads, width):
    k, v, eta = (
        jnp.moveaxis(x, 1, 2) for x in draw(batch, C, heads, width, seed=5)[1:4]
    )
    return TTTLinearTokens(k, v, eta)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("b", "t", "h", "width", "places", "resets", "most"),
    [
        # Open mini-batches; several batch elements a program, two groups of them.
        (4, 40, 2, 64, [0, 5, 10, 15], [16, 27, 6, 33], 4),
        # A head a pack; two groups of packs, and no batch element beside another.
        (2, 33, 2, 128, [3, 0], [13, 33], 1),
    ],
)
def test_values_and_gradients_agree_with_xla(b, t, h, width, places, resets, most):
    opened, reset = open_tokens(b, h, width), jax.nn.one_hot(jnp.array(resets), t)
    given = (
        draw(b, t, h, width),
        layer(1, b, h, width),
        layer(2, b, h, width),
        jnp.array(places),
        opened,
        reset.astype(bool),
    )
    expected = both(ttt_linear_xla, *given)
    with pytest.MonkeyPatch.context() as patch:
        sizes = tuned.changed("ttt_linear", packs=most, rows=most, in_step=2)
        patch.setattr(tuned, "SIZES", sizes)
        # Memory is written alike in both: one shows that it is.
        by = INTERPRETER if places[0] == 0 else True
        found = both(functools.partial(ttt_linear_tpu, interpret=by), *given)
    close(found, expected, 2e-6)
    assert all(np.abs(x).max() > 1e-3 for x in jax.tree.leaves(expected[1]))


@pytest.mark.slow
def test_bfloat16_error_is_about_that_of_rounded_tokens():
    low = draw(1, 40, 2, 64, jnp.bfloat16)
    high = tuple(x.astype(jnp.float32) for x in low)
    rest = layer(1, 1, 2, 64), layer(2, 1, 2, 64), None, None, None
    exact = both(ttt_linear_xla, high, *rest)
    kernel = both(functools.partial(ttt_linear_tpu, interpret=True), low, *rest)
    for path, distance in distances(kernel, exact).items():
        assert distance <= 3e-2, (path, distance)
    assert kernel[0][0].dtype == jnp.bfloat16


@pytest.mark.slow
def test_gradients_of_gradients_differentiate_the_same_function(monkeypatch):
    """The XLA form of the kernels' own arguments is the op: `gradients.of_kernels`."""
    given = draw(2, 20, 2, 64), layer(1, 2, 2, 64), layer(2, 2, 2, 64), None, None, None
    expected = both(ttt_linear_xla, *given)
    # It runs where heads fill no registers.
    monkeypatch.setattr(pallas_tpu._op, "heads", lambda *_: 0)
    close(both(ttt_linear_tpu, *given), expected, 1e-6)


@needs_libtpu
@pytest.mark.parametrize(
    ("chip", "axis", "sizes"),
    [
        ("v5e:2x2", "data", (8, 32, 12, 64, 16)),
        ("v5p:2x2x1", "tensor", (2, 64, 4, 128, 32)),
        # A device has one head of 64: XLA there.
        ("v6e:2x2", "tensor", (2, 32, 2, 64, 16)),
    ],
)
def test_gradients_compile_divided(chip, axis, sizes):
    b, t, h, width, size = sizes

    def loss(*tokens):
        _, y = ttt_linear(*tokens, chunk_size=size)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    tokens, specs = draw(b, t, h, width, jnp.bfloat16), None
    if axis == "tensor":
        specs = [P(None, None, axis)] * 4 + [P(axis)] * 2
    else:
        specs = [P(axis)] * 4 + [P()] * 2
    text = compiled_for_two(chip, jax.grad(loss, range(6)), tokens, axis, specs)
    heads = h // 2 if axis == "tensor" else h
    assert ("ttt_linear_backward" in text) == (heads * width % 128 == 0)
    assert "all-gather" not in text


def test_unsupported_reasons():
    def why(dtype, heads, width, size=C):
        q = jnp.zeros((1, 2, heads, width), dtype)
        return unsupported(q, q, q.astype("float32"), size)

    assert why("float32", 2, 64) == "" and why("float32", 1, 128) == ""
    assert "all be float32 or all bfloat16" in why("bfloat16", 2, 64)
    assert "a multiple of 16, got 24" in why("float32", 2, 64, 24)
    assert "no number of 3 heads, 64 wide in q" in why("float32", 3, 64)
    assert "fits in VMEM" in why("float32", 2, 1024)
