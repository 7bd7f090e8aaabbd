"""Causal attention in one kernel: the formula, its blocks, unsupported shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from memjax_kernels import causal_attention
from memjax_kernels._src.causal_attention import LONGEST, blocks, grid, unsupported
from memjax_kernels._src.common.packs import tuned
from tests.kernels.on_tpu import INTERPRETER, needs_libtpu


def plain(q, k, v, window):
    """Softmax attention, all scores at once."""
    at = jnp.arange(q.shape[1])
    distance = at[:, None] - at[None]
    seen = (distance >= 0) & (distance < (window or q.shape[1]))
    return jax.nn.dot_product_attention(q, k, v, mask=seen[None, None])


def draw(time, heads, dtype=jnp.float32):
    """Queries, keys, values, and a weight of every output."""
    draws = np.random.default_rng(time)
    return jnp.asarray(draws.standard_normal((4, 2, time, heads, 64)), dtype)


@functools.partial(jax.jit, static_argnums=(0, 1))
def with_gradients(form, window, tokens):
    *tokens, weight = tokens
    y, pull = jax.vjp(lambda *x: form(*x, window), *tokens)
    return y, pull(weight)


KERNEL = functools.partial(causal_attention, interpret=INTERPRETER)
# Faster, for what does not depend on when memory is written.
LIGHTER = functools.partial(causal_attention, interpret=True)


def test_outputs_and_gradients_are_those_of_softmax_attention():
    """Of two pairs of heads; the last of three tiles sees a part of the first."""
    tokens = draw(384, 4)
    found, expected = (with_gradients(f, 200, tokens) for f in (KERNEL, plain))
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.slow
def test_bfloat16_error_is_no_larger_than_xla():
    tokens = draw(128, 2, jnp.bfloat16)
    exact = with_gradients(plain, None, tokens.astype(jnp.float32))
    for ours, xla, true in zip(
        *(jax.tree.leaves(with_gradients(f, None, tokens)) for f in (LIGHTER, plain)),
        jax.tree.leaves(exact),
        strict=True,
    ):

        def error(x, true=true):
            return float(jnp.abs(x.astype(jnp.float32) - true).max())

        assert error(ours) < 2 * error(xla)


def draw_short():
    """As `draw`, in eight rows."""
    return np.array(draw(256, 4)).reshape(4, 8, 128, 2, 64)


@jax.jit
def of_both(q, k, v):
    """What the kernel gives, and softmax attention."""
    return LIGHTER(q, k, v), plain(q, k, v, None)


def test_scores_far_from_zero_do_not_overflow():
    q, k, v, _ = draw_short()
    np.testing.assert_allclose(*of_both(100 * q, 100 * k, v), atol=1e-4)
    # The last query's score of its own key is rounded to thousands, up or down.
    q[:, -1] *= 1e6
    np.testing.assert_allclose(*of_both(q, q, v), atol=1e-5)


def test_large_values_of_keys_far_above_do_not_overflow():
    q, k, v, _ = draw_short()
    q[..., 0], k[..., 0], k[:, 0, :, 0] = 8, 0, 35
    found, _ = of_both(q, k, 1e30 * v)
    np.testing.assert_allclose(found / 1e30, of_both(q, k, v)[1], atol=2e-5)


# What three parts of the keys add to the scores of all queries: the score of a query's
# own key is the reference; a block is computed again where others lie too far above it.
LEVELS = {
    "equal": (7, 7, 7),
    "rising": (0, 1e3, 2e3),
    "falling": (0, -1e3, -2e3),
    "first far below": (-1e4, 0, 1),
    "30 below": (0, -30, -30),
    "90 below": (0, -90, -90),
}


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of two tiles."""
    blocks.plan.cache_clear()
    sizes = tuned.changed("causal_attention", block=256, tile=128)
    monkeypatch.setattr(tuned, "SIZES", sizes)
    yield
    blocks.plan.cache_clear()


@pytest.mark.parametrize("window", [None, 300])
def test_scores_of_any_distance_keep_outputs_and_gradients(window, small_blocks):
    draws = np.random.default_rng(0)
    shape = (4, len(LEVELS) // 2, 512, 2, 64)
    tokens = draws.standard_normal(shape, dtype=np.float32)
    levels = np.repeat(list(LEVELS.values()), (128, 128, 256), axis=1)
    tokens[0, ..., 0] = 8
    tokens[1, ..., 0] = levels.reshape(-1, 2, 512).swapaxes(1, 2)
    # Memory is written alike in both: one shows that it is.
    kernel = KERNEL if window else LIGHTER
    found, expected = (with_gradients(f, window, tokens) for f in (kernel, plain))
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        each = (
            np.asarray(x).swapaxes(1, 2).reshape(6, 512, 64) for x in (ours, theirs)
        )
        for name, x, y in zip(LEVELS, *each, strict=True):
            # Scores are rounded to 24 bits.
            error = 2e-5 + 3e-7 * np.abs(LEVELS[name]).max()
            atol = error * np.abs(y).max()
            np.testing.assert_allclose(x, y, atol=atol, err_msg=name)


@settings(max_examples=40)
@given(
    number=st.integers(1, 16),
    # Windows that end where blocks do, or a token or two from there.
    window=st.none()
    | st.integers(1, 2000)
    | st.builds(lambda n, more: 128 * n + more, st.integers(1, 12), st.integers(-1, 2)),
    by_key=st.booleans(),
)
def test_grid_steps_are_the_visible_blocks(number, window, by_key):
    time = 128 * number
    plan = blocks.plan(time, window, by_key)
    at = np.arange(time)
    distance = at[:, None] - at[None]
    seen = (distance >= 0) & (distance < (window or time))
    tiles = seen.reshape(time // plan.block, plan.block, -1, plan.block)
    tiles = tiles.swapaxes(1, 2)
    steps = plan.steps
    expected = set(zip(*np.nonzero(tiles.any((2, 3))), strict=True))
    found = list(zip(steps.query, steps.key, strict=True))
    assert set(found) == expected and len(found) == len(expected)
    for i, j, kind in zip(steps.query, steps.key, steps.kind, strict=True):
        first = plan.distances[kind]
        assert (first is None) == tiles[i, j].all()
        assert first in (None, (i - j) * plan.block)
        np.testing.assert_array_equal(computed(plan, int(kind)), tiles[i, j])
    outer, first = steps.key if by_key else steps.query, np.roll(steps.last, 1) == 1
    if not by_key:
        # References of queries are scores of their own keys.
        assert (steps.key == steps.query)[first].all()
    # Each sum starts and is written once.
    assert list(outer[first]) == list(outer[steps.last == 1])
    assert sorted(outer[first]) == sorted(set(outer))
    assert sorted(steps.query[steps.fresh == 1]) == sorted(set(steps.query))


def computed(plan, kind):
    """The pairs of a query and a key that a step adds up, [block, block]."""
    found = np.zeros((plan.block, plan.block), int)
    for part in plan.parts(kind):
        if part.distance is None:
            found[part.queries, part.keys] += 1
            continue
        for start in range(part.queries.start, part.queries.stop, plan.tile):
            distance = part.distance + start - part.queries.start
            if plan.hides(distance, plan.tile):
                shape = (plan.tile, plan.tile)
                seen = np.asarray(grid.seen(shape, distance, plan.window)).T
            else:
                seen = np.ones((plan.tile, plan.tile), bool)
            found[start : start + plan.tile, part.keys] += seen
    return found


@pytest.mark.parametrize(
    ("query", "key", "reason"),
    [
        ((2, 256, 2, 64), (2, 256, 2, 64), ""),
        ((2, 256, 2, 128), (2, 256, 2, 128), "of 64 channels, got 2 of 128"),
        ((2, 256, 3, 64), (2, 256, 3, 64), "even number of 64 channels, got 3 of 64"),
        ((2, 256, 2, 64), (2, 256, 1, 64), "keys must be as queries"),
        ((2, 128, 2, 64), (2, 256, 2, 64), "keys must be as queries"),
        ((2, 200, 2, 64), (2, 200, 2, 64), "200 tokens are no multiple of 128"),
        ((2, 65536, 2, 64), (2, 65536, 2, 64), "65536 tokens are no multiple"),
    ],
)
def test_other_shapes_are_refused_by_name(query, key, reason):
    q, k = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in (query, key))
    found = unsupported(q, k)
    assert reason in found and bool(found) == bool(reason)


def test_other_dtypes_are_refused_by_name():
    x = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.float32)
    assert unsupported(x, x) == "tokens are float32, not bfloat16"


@needs_libtpu
@pytest.mark.parametrize(
    ("chip", "time", "window"),
    # The longest on the chip with the least memory.
    [("v5e:2x2", 384, None), ("v5p:2x2x1", LONGEST, 1000)],
)
def test_the_gradient_compiles_for_a_tpu(chip, time, window):
    device = topologies.get_topology_desc(chip, "tpu").devices[0]
    place = SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct((1, time, 2, 64), jnp.bfloat16, sharding=place)

    def loss(q, k, v):
        return causal_attention(q, k, v, window).astype(jnp.float32).sum()

    assert jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()
