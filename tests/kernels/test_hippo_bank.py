"""The closed-form banks against the literal recurrence and their own laws."""

import inspect

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.linalg
import scipy.special

from memjax_kernels._src.hippo import bank
from tests.kernels import hippo_recurrence

ORDERS = [32, 64]
BOUND = 1e-10
quick = hypothesis.settings(max_examples=25, deadline=None, derandomize=True)


def largest(difference):
    return np.abs(difference).max()


@pytest.mark.parametrize("order", [1, 2, 64])
def test_nodes_are_those_of_numpy(order):
    z, weights = np.polynomial.legendre.leggauss(order)
    nodes, ours = bank.gauss_legendre(order)
    np.testing.assert_allclose(nodes, (z + 1) / 2, rtol=0, atol=1e-15)
    np.testing.assert_allclose(ours, weights / 2, rtol=1e-11, atol=1e-15)


def test_cached_nodes_cannot_be_changed():
    for array in bank.gauss_legendre(5):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0


def test_many_nodes_integrate_a_polynomial_exactly():
    nodes, weights = bank.gauss_legendre(8640)
    assert np.all(np.diff(nodes) > 0) and 0 < nodes[0] and nodes[-1] < 1
    for power in (0, 1, 2, 1000, 17279):
        assert weights @ nodes**power == pytest.approx(1 / (power + 1), rel=1e-9)


def test_basis_is_the_shifted_legendre_basis():
    x = np.linspace(0, 1, 41)
    degrees = np.arange(60)[:, None]
    plain = scipy.special.eval_legendre(degrees, 2 * x - 1)
    expected = np.sqrt(2 * degrees + 1) * plain
    np.testing.assert_allclose(bank.legendre(60, x), expected, atol=1e-12)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.9, 0.999])
def test_transition_is_the_matrix_power(order, ratio):
    a, _ = hippo_recurrence.legs_matrices(order)
    expected = scipy.linalg.expm(a * np.log(ratio))
    assert largest(bank.transition(order, ratio) - expected) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_block_equals_the_unrolled_recurrence(order):
    start, stop = 40, 45
    transition, kernel = hippo_recurrence.unroll(order, start, stop)
    assert largest(bank.transition(order, start / stop) - transition) <= BOUND
    assert largest(bank.block_kernel(order, start, stop) - kernel) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_full_history_equals_the_recurrence(order):
    signal = np.random.default_rng(order).normal(size=(8, 3))
    state = bank.block_kernel(order, 0, 8) @ signal
    assert largest(state - hippo_recurrence.compress(signal, order)) <= BOUND


@quick
@hypothesis.given(st.integers(1, 80), st.floats(0, 1), st.floats(0, 1))
def test_transitions_compose(order, first, second):
    product = bank.transition(order, first) @ bank.transition(order, second)
    assert largest(product - bank.transition(order, first * second)) <= BOUND


@quick
@hypothesis.given(st.integers(1, 80), st.floats(0, 1))
def test_transition_contracts(order, ratio):
    norm = np.linalg.norm(bank.transition(order, ratio), 2)
    assert norm <= np.sqrt(ratio) + 1e-11


@pytest.mark.parametrize("ratio", [0.5, 0.9, 0.999])
def test_transition_norm_reaches_the_root_of_the_ratio(ratio):
    norm = np.linalg.norm(bank.transition(128, ratio), 2)
    assert norm == pytest.approx(np.sqrt(ratio), abs=1e-10)


def test_transition_ends_and_shape():
    assert not bank.transition(7, 0.0).any()
    assert largest(bank.transition(7, 1.0) - np.eye(7)) <= 1e-14
    p = bank.transition(7, 0.4)
    assert np.array_equal(p, np.tril(p))


def test_kernel_columns_are_integrals_of_the_basis():
    order, start, stop = 20, 5, 12
    kernel = bank.block_kernel(order, start, stop)
    inner, weights = bank.gauss_legendre(order)
    for j in range(stop - start):
        integral = bank.legendre(order, (start + j + inner) / stop) @ weights / stop
        assert largest(kernel[:, j] - integral) <= 1e-14


@quick
@hypothesis.given(
    st.integers(1, 48), st.lists(st.integers(1, 40), min_size=1, max_size=6)
)
def test_state_is_split_invariant(order, lengths):
    total = sum(lengths)
    signal = np.random.default_rng(total).normal(size=(total, 2))
    state, start = np.zeros((order, 2)), 0
    for length in lengths:
        stop = start + length
        state = bank.transition(order, start / stop) @ state
        state += bank.block_kernel(order, start, stop) @ signal[start:stop]
        start = stop
    assert largest(state - bank.block_kernel(order, 0, total) @ signal) <= BOUND


def test_low_degree_history_is_read_back_exactly():
    order, edges = 5, np.arange(400 + 1) / 400
    # Token means of a cubic: what a staircase of the cubic's own projection holds.
    means = np.diff(edges**4 - edges**2) * 400
    state = bank.block_kernel(order, 0, 400) @ means[:, None]
    points = bank.hippo_sample_points(50)
    read = (bank.hippo_reconstruction(order, points) @ state)[:, 0]
    # The staircase is within its step height squared of the cubic.
    assert largest(read - (4 * points**3 - 2 * points)) < 2e-4


@pytest.mark.parametrize(
    ("waves", "order", "error"),
    [(1, 32, 1.2e-5), (3, 32, 2.3e-4), (5, 32, 9.8e-4), (0, 32, 0.97), (0, 128, 0.90)],
)
def test_signals_are_read_back_within_the_papers_errors(waves, order, error):
    """Table 12 of Elastic Memory: sums of sines with 1 to 5 cycles; 0 is noise."""
    rng = np.random.default_rng(waves)
    cycles, phases = rng.uniform(1, 5, (waves, 50)), rng.uniform(0, 7, (waves, 50))
    t = np.arange(1024)[:, None, None] / 1024
    signal = np.sin(2 * np.pi * cycles * t + phases).sum(axis=1)
    if not waves:
        signal = rng.standard_normal((1024, 50))
    state = bank.block_kernel(order, 0, 1024) @ signal
    middles = (np.arange(1024) + 0.5) / 1024
    read = bank.hippo_reconstruction(order, middles) @ state
    # On sines float64 is more accurate than the paper by orders of magnitude.
    most = error / 1000 if waves else error
    assert np.median(np.mean((read - signal) ** 2, axis=0)) <= most


def test_bank_holds_every_block():
    built = bank.build_hippo_bank(6, 9, 4)
    assert built.transition.dtype == built.kernel.dtype == np.float32
    assert not built.transition[0].any()
    for i in range(4):
        p, k = bank.transition(6, i / (i + 1)), bank.block_kernel(6, 9 * i, 9 * i + 9)
        np.testing.assert_array_equal(built.transition[i], p.astype(np.float32))
        np.testing.assert_array_equal(built.kernel[i], k.astype(np.float32))


def test_large_bank_reads_a_document():
    order, length, blocks = 540, 256, 4
    built = bank.build_hippo_bank(order, length, blocks)
    signal = np.random.default_rng(0).normal(size=(blocks, length, 2))
    state = np.zeros((order, 2), np.float32)
    for i in range(blocks):
        state = built.transition[i] @ state + built.kernel[i] @ signal[i].astype("f4")
    whole = bank.block_kernel(order, 0, length * blocks) @ signal.reshape(-1, 2)
    assert largest(state - whole) <= 1e-5
    assert np.linalg.norm(whole, axis=0).max() < 1


def test_uniform_points():
    np.testing.assert_allclose(
        bank.hippo_sample_points(4, "uniform"), [0, 0.25, 0.5, 0.75]
    )


def test_exponential_points_ascend_and_are_the_papers():
    points = bank.hippo_sample_points(5, "exponential", 0.5)
    printed = [1 - 0.5 ** (5 - 1 - j) for j in range(5)]
    np.testing.assert_allclose(points, printed[::-1])
    np.testing.assert_allclose(points, [0, 0.5, 0.75, 0.875, 0.9375])


@quick
@hypothesis.given(
    st.integers(1, 600),
    st.sampled_from(["uniform", "exponential"]),
    st.floats(0.01, 0.999),
)
def test_sample_points_are_in_the_history(count, sampling, decay):
    points = bank.hippo_sample_points(count, sampling, decay)
    assert points.shape == (count,) and points[0] == 0
    assert np.all(np.diff(points) >= 0) and points[-1] <= 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bank.legendre(0, np.zeros(1)), "order must .* got 0"),
        (lambda: bank.legendre(2, np.array([1.5])), r"x must .* got 1\.5"),
        (lambda: bank.legendre(2, np.array([np.nan])), "x must .* got nan"),
        (lambda: bank.gauss_legendre(0), "order must"),
        (lambda: bank.transition(0, 0.5), "order must"),
        (lambda: bank.transition(2, 1.5), r"ratio must .* got 1\.5"),
        (lambda: bank.transition(2, -0.5), r"ratio must .* got -0\.5"),
        (lambda: bank.transition(2, float("nan")), "ratio must .* got nan"),
        (lambda: bank.block_kernel(0, 0, 1), "order must"),
        (lambda: bank.block_kernel(2, -1, 1), "start must .* got -1"),
        (lambda: bank.block_kernel(2, 3, 3), "stop must .* got 3"),
        (lambda: bank.hippo_sample_points(0), "count must"),
        (
            lambda: bank.hippo_sample_points(2, "exponential", 1.0),
            r"decay must .* got 1\.0",
        ),
        (
            lambda: bank.hippo_sample_points(2, "exponential", 0.0),
            r"decay must .* got 0\.0",
        ),
        (lambda: bank.hippo_reconstruction(0, np.zeros(1)), "order must"),
        (lambda: bank.hippo_reconstruction(2, np.array([-1.0])), "points must"),
        (lambda: bank.build_hippo_bank(0, 4, 2), "order must"),
        (lambda: bank.build_hippo_bank(4, 0, 2), "block_length must"),
        (lambda: bank.build_hippo_bank(4, 4, 0), "blocks must"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (bank.hippo_sample_points, (3, "log"), "sampling must .* got 'log'"),
    ],
)
def test_unknown_names_are_refused(function, arguments, message):
    # The tests' type checks would speak first; users run without them.
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(function)(*arguments)
