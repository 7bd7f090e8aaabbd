"""Exact HiPPO-LegS banks in closed form, on the host, in float64.

The state of HiPPO-LegS is the first `order` coefficients of the full history on shifted
Legendre polynomials. With the input held constant over each token, its
zero-order-hold recurrence is exactly the projection of the staircase of tokens,
so the product over a block telescopes: no matrix A, exponential or power of one
is ever formed. A history of `start` tokens becomes one of `stop` tokens by

    C <- transition(order, start / stop) @ C + block_kernel(order, start, stop) @ F

with C the state [N, D] and F the block's tokens [stop - start, D].

References:
    Elastic Memory, section 2.2, equations 4 to 8 and appendix E.
    Gu et al., HiPPO: Recurrent Memory with Optimal Polynomial Projections, 2020.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float32, Float64

from memjax_kernels._src.common.arguments import check_sizes

HippoSampling = Literal["uniform", "exponential"]


class HippoBank(NamedTuple):
    """The update matrices of blocks 0 to I-1, all of one length.

    Attributes:
        transition: [I, N, N] lower triangular; block 0 has no past, so it is zero.
        kernel: [I, N, L] column j is the projection of token j of the block.
    """

    transition: Float32[np.ndarray, "I N N"]
    kernel: Float32[np.ndarray, "I N L"]


def legendre(order: int, x: Float64[np.ndarray, " X"]) -> Float64[np.ndarray, "N X"]:
    """The orthonormal basis g_n(x) = sqrt(2n+1) P_n(2x-1) of [0, 1], row n of degree n.

    Raises ValueError if `order` is below 1 or a point lies outside [0, 1].
    """
    check_sizes(order=order)
    _check_points("x", x)
    norms = np.sqrt(2 * np.arange(order) + 1)
    rows = _legendre_rows(order, 2 * x - 1)
    rows *= norms[:, None]
    return rows


# Nodes depend on the order alone, and every transition needs them.
@functools.lru_cache(maxsize=8)
def gauss_legendre(
    order: int,
) -> tuple[Float64[np.ndarray, " N"], Float64[np.ndarray, " N"]]:
    """Ascending Gauss-Legendre nodes of (0, 1), and weights that sum to 1; read-only.

    Exact for polynomials of degree up to 2N-1. Newton iteration on the recurrence from
    Tricomi's estimate: O(order**2) time and O(order) memory, where an eigenvalue solver
    would take O(order**3). Raises ValueError if `order` is below 1.
    """
    check_sizes(order=order)
    order = int(order)
    angle = np.pi * (4 * np.arange(order, 0, -1) - 1) / (4 * order + 2)
    # Tricomi's estimate, from which Newton converges in a few steps.
    z = (1 - (order - 1) / (8 * order**3)) * np.cos(angle)
    for _ in range(5):
        last = before = z
        for values in itertools.islice(_degrees(z), order + 1):
            before, last = last, values
        z = z - last * (1 - z * z) / (order * (before - z * last))
    # Nodes are symmetric about 0; rounding is not.
    z = (z - z[::-1]) / 2
    # The usual 1 / ((1 - z**2) P'**2) cancels near the ends and is 100 times less
    # accurate than this sum of squares.
    squares = np.zeros_like(z)
    for n, values in enumerate(itertools.islice(_degrees(z), order)):
        squares += (2 * n + 1) * values**2
    found = (1 + z) / 2, 1 / squares
    for array in found:
        # All callers share them.
        array.flags.writeable = False
    return found


def transition(order: int, ratio: float) -> Float64[np.ndarray, "N N"]:
    """Computes ratio**A, which moves a state to a longer history: lower triangular.

    Entry [n, m] is ratio * integral of g_n(ratio u) g_m(u) over u in [0, 1]: the
    old expansion fills the first `ratio` of the new history. The spectral norm is
    at most sqrt(ratio), and reaches it as N grows: the recurrence contracts.

    `ratio` is old length over new length, in [0, 1]; 0 (no past) gives zeros. Raises
    ValueError if it lies outside, or `order` is below 1.
    """
    check_sizes(order=order)
    if not 0 <= ratio <= 1:
        raise ValueError(f"ratio must be in [0, 1], got {ratio}")
    if ratio == 0:
        return np.zeros((order, order))
    nodes, weights = gauss_legendre(order)
    product = legendre(order, ratio * nodes) @ (weights * legendre(order, nodes)).T
    product *= ratio
    # g_n(ratio u) has degree n, so what stands above the diagonal is rounding.
    return np.tril(product)


def block_kernel(order: int, start: int, stop: int) -> Float64[np.ndarray, "N L"]:
    """Projects the tokens start to stop-1 of a history of `stop` tokens.

    Column j is the integral of g_n over [(start+j)/stop, (start+j+1)/stop], and L is
    stop - start. Raises ValueError if `order` is below 1, `start` below 0 or `stop` not
    above it.
    """
    check_sizes(order=order)
    if start < 0:
        raise ValueError(f"start must be at least 0, got {start}")
    if stop <= start:
        raise ValueError(f"stop must be above start={start}, got {stop}")
    # A column is a difference of antiderivatives at a token's edges: no quadrature.
    edges = np.arange(start, stop + 1) / stop
    return np.diff(_antiderivatives(order, edges), axis=1)


def hippo_sample_points(
    count: int, sampling: HippoSampling = "uniform", decay: float = 0.9
) -> Float64[np.ndarray, " M"]:
    """Chooses the fractions of the history at which a memory is read.

    0 is the first token's edge and 1 the present; they ascend in time.
    `uniform` is x_j = j / count. `exponential` is x_j = 1 - decay**j: the points
    1 - decay**(count-1-j) of the paper, which run backwards from the present as
    printed, put in ascending order. The first is 0, the start of the history, and
    the others crowd towards the present; where decay**j is below 1e-16 they round
    to 1, so a small `decay` with many points reads the present many times.

    Args:
        count: number M of points, at least 1.
        sampling: "uniform" or "exponential".
        decay: the factor by which the distance to the present shrinks from one point
            to the next, in (0, 1); checked for both samplings, used by "exponential".

    Returns:
        [M] fractions in [0, 1].

    Raises:
        ValueError: if `count` is below 1, `sampling` unknown or `decay` outside (0, 1).
    """
    check_sizes(count=count)
    if not 0 < decay < 1:
        raise ValueError(f"decay must be in (0, 1), got {decay}")
    steps = np.arange(count, dtype=np.float64)
    match sampling:
        case "uniform":
            return steps / count
        case "exponential":
            return 1 - decay**steps
    raise ValueError(f"sampling must be 'uniform' or 'exponential', got {sampling!r}")


def hippo_reconstruction(
    order: int, points: Float64[np.ndarray, " M"]
) -> Float64[np.ndarray, "M N"]:
    """Builds the matrix that reads a state back at fractions of its history.

    Args:
        order: number N of coefficients, at least 1.
        points: [M] fractions in [0, 1], for example from `hippo_sample_points`.

    Returns:
        [M, N] matrix R; R @ C is the remembered signal at the points.

    Raises:
        ValueError: if `order` is below 1 or a point lies outside [0, 1].
    """
    check_sizes(order=order)
    points = np.asarray(points)
    _check_points("points", points)
    return np.ascontiguousarray(legendre(order, points).T)


def build_hippo_bank(order: int, block_length: int, blocks: int) -> HippoBank:
    """Builds the transition and kernel of every block of equal length.

    Computed in float64 and rounded to float32 once. The bank holds 4 I N (N + L) bytes;
    building it needs 24 N**2 more for a moment (three float64 matrices). At order 8640,
    block length 2048 and 16 blocks that is 5.9 GB, 4.8 GB of it transitions, and 1.8 GB
    more.

    Args:
        order: number N of coefficients, at least 1.
        block_length: tokens L in a block, at least 1.
        blocks: number I of blocks, at least 1.

    Returns:
        The bank.

    Raises:
        ValueError: if an argument is below 1.
    """
    check_sizes(order=order, block_length=block_length, blocks=blocks)
    transitions = np.empty((blocks, order, order), np.float32)
    kernels = np.empty((blocks, order, block_length), np.float32)
    for i in range(blocks):
        start, stop = i * block_length, (i + 1) * block_length
        transitions[i] = transition(order, start / stop)
        kernels[i] = block_kernel(order, start, stop)
    return HippoBank(transitions, kernels)


def _antiderivatives(
    order: int, x: Float64[np.ndarray, " X"]
) -> Float64[np.ndarray, "N X"]:
    """Integrates g_n from 0 to x for every n below `order`: [N, X]."""
    rows = _legendre_rows(order + 1, 2 * x - 1)
    integrals = np.empty((order, x.size))
    integrals[0] = x
    norms = 2 * np.sqrt(2 * np.arange(1, order) + 1)
    np.subtract(rows[2:], rows[:-2], out=integrals[1:])
    integrals[1:] /= norms[:, None]
    return integrals


def _legendre_rows(
    count: int, z: Float64[np.ndarray, " X"]
) -> Float64[np.ndarray, "N X"]:
    """Evaluates the plain P_0 .. P_{count-1} at z in [-1, 1]: [count, X]."""
    rows = np.empty((count, z.size))
    for row, values in zip(rows, _degrees(z), strict=False):
        row[:] = values
    return rows


def _degrees(z: Float64[np.ndarray, " X"]) -> Iterator[np.ndarray]:
    """Yields P_0(z), P_1(z), ... without end, by the three-term recurrence."""
    before, last = np.zeros_like(z), np.ones_like(z)
    for n in itertools.count():
        yield last
        before, last = last, ((2 * n + 1) * z * last - n * before) / (n + 1)


def _check_points(name: str, points: Float64[np.ndarray, " X"]) -> None:
    """Raises ValueError unless every point lies in [0, 1]; refuses NaN."""
    outside = points[~((points >= 0) & (points <= 1))]
    if outside.size:
        raise ValueError(f"{name} must lie in [0, 1], got {outside[0]}")
