"""Chunks of segments, elements at their own positions, against lists of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax_kernels._src.common import chunks, decays
from memjax_kernels._src.common.products import multiplier
from memjax_kernels._src.common.token_scan import scan_tokens

SIZE = 4


def positions(*offsets):
    return jnp.asarray(offsets, jnp.int32)


@pytest.mark.parametrize("time", [1, 3, 4, 5, 9])
@pytest.mark.parametrize("places", [None, (0, 0), (3, 1)])
def test_split_puts_tokens_at_their_positions_and_join_returns_them(time, places):
    position = None if places is None else positions(*places)
    x = np.random.default_rng(0).normal(size=(2, time, 3)).astype("f4")
    cut = np.asarray(jax.jit(chunks.split, static_argnums=1)(x, SIZE, position))
    count = chunks.count_chunks(time, SIZE, places is None)
    assert cut.shape == (2, count, SIZE, 3)
    for row, place in enumerate(places or (0, 0)):
        laid = np.zeros((count * SIZE, 3), "f4")
        laid[place : place + time] = x[row]
        np.testing.assert_array_equal(cut[row].reshape(-1, 3), laid)
    back = jax.jit(chunks.join, static_argnums=1)(cut, time, position)
    np.testing.assert_array_equal(back, x)


def test_chunk_count_is_the_maximum_over_positions():
    for time in range(1, 14):
        needed = [-(-(place + time) // SIZE) for place in range(SIZE)]
        assert chunks.count_chunks(time, SIZE, aligned=False) == max(needed)
        assert chunks.count_chunks(time, SIZE, aligned=True) == needed[0]


def test_padding_gets_no_gradient_and_tokens_get_theirs():
    x = jnp.ones((2, 5, 1))
    weights = jnp.arange(2.0 * 3 * SIZE).reshape(2, 3, SIZE, 1)
    # Twelve places hold 5 tokens from place 3 on, of which there are 8.
    grad = np.asarray(
        jax.jit(
            jax.grad(
                lambda x: jnp.sum(
                    weights[:, :2] * chunks.split(x, SIZE, positions(3, 0))
                )
            )
        )(x)
    )[..., 0]
    np.testing.assert_array_equal(grad, [np.arange(3, 8), 12 + np.arange(5)])


@pytest.mark.parametrize("time", [1, 4, 6])
def test_chunk_is_full_where_tokens_reach_its_end(time):
    count = chunks.count_chunks(time, SIZE, aligned=False)
    completed = jax.jit(chunks.completed, static_argnums=(0, 1, 2, 4))
    done = completed(count, SIZE, time, positions(0, 3), 2)
    expected = [
        [place + time >= SIZE * (n + 1) for n in range(count)] for place in (0, 3)
    ]
    np.testing.assert_array_equal(done, expected)
    aligned = completed(count, SIZE, time, None, 2)
    np.testing.assert_array_equal(aligned, [expected[0]] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2, 3, 8])
def test_rematerialised_scan_equals_lax_scan(every):
    xs = jnp.linspace(0.1, 0.8, 7)

    def body(carry, x):
        carry = jnp.sin(carry + x)
        return carry, {"square": carry**2}

    def value(scan, start, xs):
        carry, ys = scan(body, start, xs)
        return carry + jnp.sum(ys["square"] * jnp.arange(1.0, 8.0))

    pulled = jax.value_and_grad(value, argnums=(1, 2))

    def both(scan):
        return jax.jit(pulled, static_argnums=0)(scan, 0.5, xs)

    actual, expected = (
        both(lambda *a: chunks.scan(*a, remat_every=every)),
        both(jax.lax.scan),
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), actual, expected)


@pytest.mark.slow
def test_residuals_shrink_with_remat_every():
    """What crosses from the forward to the backward pass, by its leading axis."""

    def kept(every):
        def run(s, xs):
            return chunks.scan(
                lambda s, x: (jnp.sin(s + x), jnp.sum(s)), s, xs, remat_every=every
            )

        shapes = jax.eval_shape(
            lambda s, xs: jax.vjp(run, s, xs)[1], jnp.ones((3, 3)), jnp.ones((12, 3, 3))
        )
        sizes = [x.size for x in jax.tree.leaves(shapes)]
        return sum(sizes) - 12 * 9  # the inputs

    assert kept(4) < kept(1) <= 12 * 9


def oracle_decay(gates):
    """In float64: exp of gates j+1..i, summed one by one."""
    size = gates.shape[-1]
    out = np.zeros((*gates.shape, size))
    for i in range(size):
        for j in range(i + 1):
            out[..., i, j] = np.exp(np.sum(gates[..., j + 1 : i + 1], axis=-1))
    return out


STRONG = np.array([-0.1, -1e6, -1e-3, -1e-3, -30, -0.5, -np.inf, -1e-3], np.float32)


@pytest.mark.parametrize("size", [1, 5, 8])
def test_decay_is_product_of_gates_between(size):
    gates = -np.random.default_rng(0).exponential(size=(2, 3, size)).astype("f4")
    gates[1, 2] = STRONG[:size]

    def both(g):
        return (
            chunks.decay(g),
            jax.grad(lambda g: jnp.sum(chunks.decay(g) ** 2))(g),
        )

    actual, grad = jax.jit(both)(gates)
    # exp of a sum of about -30, which float32 holds to a few millionths.
    np.testing.assert_allclose(actual, oracle_decay(np.float64(gates)), 1e-5, 1e-30)
    assert np.isfinite(grad).all()


@pytest.mark.slow
def test_decays_of_channels_are_those_of_each():
    """Every product that a chunk needs, with resets as gates of -inf."""
    rng = np.random.default_rng(0)
    gates = -rng.exponential(size=(1, 1, 8, 3)).astype("f4")
    gates[..., 0] = STRONG
    reset = np.zeros((1, 8), bool)
    reset[0, 5] = True
    left = jax.jit(decays.decays, static_argnums=2)(gates, reset, 8)
    cut = np.where(reset[:, None, :, None], -np.inf, np.float64(gates))
    between = oracle_decay(np.moveaxis(cut, -1, -2))[0, 0]  # [D, C, C]
    since = np.exp(np.cumsum(cut, axis=-2))
    np.testing.assert_allclose(left.since, since, 1e-6, 1e-30)
    np.testing.assert_allclose(
        np.asarray(left.until)[0, 0].T, between[:, -1], 1e-6, 1e-30
    )
    q, k, x = rng.normal(size=(3, 1, 1, 8, 3)).astype("f4")
    weights = rng.normal(size=(1, 1, 8, 8)).astype("f4")
    multiply = multiplier(jnp.dtype("float32"))
    found = jax.jit(decays.scores, static_argnums=3)((q, x), k, left, multiply)
    for query, pairs in zip((q, x), found, strict=True):
        expected = np.einsum("ic,jc,cij->ij", query[0, 0], k[0, 0], between)
        np.testing.assert_allclose(pairs[0, 0], expected, 1e-5, 1e-6)
    read = np.asarray(
        jax.jit(decays.sums, static_argnums=3)(weights, x, left, multiply)
    )
    expected = np.einsum("ij,jc,cij->ic", weights[0, 0], x[0, 0], between)
    np.testing.assert_allclose(read[0, 0], expected, 1e-5, 1e-6)


def test_channels_need_a_power_of_two():
    with pytest.raises(ValueError, match="power of two tokens, got 6"):
        decays.decays(jnp.zeros((1, 1, 6, 2)), None, 6)


def test_resets_off_chunk_starts_are_misplaced():
    reset = np.zeros((2, 9), bool)
    reset[0, [0, 4, 8]] = reset[1, [2, 6]] = True
    position = positions(0, 2)
    found = chunks.misplaced_resets(jnp.asarray(reset), SIZE, position)
    assert found is not None and not found.any()
    reset[1, 5] = True
    with pytest.raises(ValueError, match="batch element 1 before token 5, 3 into it"):
        chunks.misplaced_resets(jnp.asarray(reset), SIZE, position)
    wrong = jax.jit(chunks.misplaced_resets, static_argnums=1)
    expected = np.zeros((2, 9), bool)
    expected[1, 5:] = True
    np.testing.assert_array_equal(wrong(reset, SIZE, position), expected)
    # Without positions every batch element starts a chunk.
    np.testing.assert_array_equal(wrong(reset, SIZE, None)[:, 3], [False, True])


def test_the_scan_of_tokens_steps_and_resets():
    def step(x, y, state):
        return (
            {"sum": state["sum"] + x},
            state["sum"] if y is None else y,
        )

    x = jnp.arange(1.0, 9.0).reshape(2, 4, 1)
    reset = jnp.asarray([[False] * 4, [True, False, True, False]])
    start = {"sum": jnp.asarray([[10.0], [jnp.nan]])}
    state, before = scan_tokens(step, (x, None), start, reset)
    np.testing.assert_array_equal(state["sum"], [[20], [15]])
    np.testing.assert_array_equal(before[..., 0], [[10, 11, 13, 16], [0, 5, 0, 7]])
    kept, _ = scan_tokens(step, (x, None), {"sum": jnp.ones((2, 1))})
    np.testing.assert_array_equal(kept["sum"], [[11], [27]])
