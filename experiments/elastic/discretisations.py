"""HiPPO-LegS as a token recurrence, c_k = A_k c_{k-1} + B_k f_k, in float64.

The slow, literal form: one exponential or triangular solve per token. It is the
independent reference for `memjax_kernels._src.hippo.bank`, and the only form of the
approximate discretisations, which do not telescope.

    d/dt c = -(1/t) A c + (1/t) B f
    A[n, m] = sqrt((2n+1)(2m+1)) below the diagonal, n+1 on it;  B[n] = sqrt(2n+1)

Token k = 0, 1, ... fills [k, k+1]. The state before token 0 is zero, and every
method is defined there:

    zoh       A_k = (k/(k+1))**A, B_k = A^-1 (I - A_k) B;  A_0 = 0, so c_0 = e_0 f_0
    forward   A_k = I - A/(k+1), B_k = B/(k+1)
    backward  A_k = (I + A/(k+1))^-1, B_k = A_k B/(k+1)
    bilinear  S = (I + A/2(k+1))^-1, A_k = S (I - A/2(k+1)), B_k = S B/(k+1)

The three approximations take 1/t at the end of the token's interval, on both
sides of the bilinear rule, as the HiPPO authors' program does: at its start the
first token would divide by zero.

References:
    Elastic Memory, equations 3, 4, 19 and 25, table 12.
    Gu et al., HiPPO: Recurrent Memory with Optimal Polynomial Projections, 2020,
    appendix B.3.
"""

from typing import Literal, NamedTuple, get_args

import numpy as np
import scipy.linalg
from jaxtyping import Float64

Method = Literal["zoh", "forward", "backward", "bilinear"]


class Step(NamedTuple):
    """One token's update.

    Attributes:
        state: [N, N] multiplies the old state.
        token: [N] multiplies the token.
    """

    state: Float64[np.ndarray, "N N"]
    token: Float64[np.ndarray, " N"]


class Unrolled(NamedTuple):
    """The product of a block's steps.

    Attributes:
        transition: [N, N] multiplies the state before the block.
        kernel: [N, L] multiplies the block's tokens.
    """

    transition: Float64[np.ndarray, "N N"]
    kernel: Float64[np.ndarray, "N L"]


def legs_matrices(order: int) -> Step:
    """Builds A [N, N] and B [N] of the equation above.

    Args:
        order: number N of coefficients, at least 1.

    Raises:
        ValueError: if `order` is below 1.
    """
    if order < 1:
        raise ValueError(f"order must be at least 1, got {order}")
    degrees = np.arange(order, dtype=np.float64)
    b = np.sqrt(2 * degrees + 1)
    return Step(np.tril(np.outer(b, b), -1) + np.diag(degrees + 1), b)


def step_matrices(order: int, k: int, method: Method = "zoh") -> Step:
    """Discretises the equation over token k.

    Args:
        order: number N of coefficients, at least 1.
        k: index of the token in its stream, at least 0.
        method: "zoh", "forward", "backward" or "bilinear".

    Returns:
        A_k and B_k.

    Raises:
        ValueError: if `order` is below 1, `k` below 0 or `method` unknown.
    """
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {get_args(Method)}, got {method!r}")
    if k < 0:
        raise ValueError(f"k must be at least 0, got {k}")
    return _step(*legs_matrices(order), k, method)


def compress(
    signal: Float64[np.ndarray, "T D"],
    order: int,
    method: Method = "zoh",
) -> Float64[np.ndarray, "N D"]:
    """Runs the recurrence over a whole signal from the zero state.

    Args:
        signal: [T, D] tokens, T at least 1.
        order: number N of coefficients, at least 1.
        method: "zoh", "forward", "backward" or "bilinear".

    Returns:
        [N, D] the state after the last token.

    Raises:
        ValueError: if `signal` is empty, `order` below 1 or `method` unknown.
    """
    if len(signal) < 1:
        raise ValueError(f"signal must hold at least 1 token, got {len(signal)}")
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {get_args(Method)}, got {method!r}")
    a, b = legs_matrices(order)
    state = np.zeros((order, signal.shape[1]))
    for k, token in enumerate(signal):
        step = _step(a, b, k, method)
        state = step.state @ state + np.outer(step.token, token)
    return state


def unroll(order: int, start: int, stop: int, method: Method = "zoh") -> Unrolled:
    """Multiplies out the steps of tokens start to stop-1, equation 27.

    Costs O(L N**2 (N + L)): the naive way to build a bank.

    Args:
        order: number N of coefficients, at least 1.
        start: tokens before the block, at least 0.
        stop: tokens up to and with the block, above `start`.
        method: "zoh", "forward", "backward" or "bilinear".

    Returns:
        The transition [N, N] and kernel [N, stop - start].

    Raises:
        ValueError: if `order` is below 1, `start` below 0, `stop` not above it or
          `method` unknown.
    """
    if start < 0:
        raise ValueError(f"start must be at least 0, got {start}")
    if stop <= start:
        raise ValueError(f"stop must be above start={start}, got {stop}")
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {get_args(Method)}, got {method!r}")
    a, b = legs_matrices(order)
    transition = np.eye(order)
    kernel = np.zeros((order, stop - start))
    for j, k in enumerate(range(start, stop)):
        step = _step(a, b, k, method)
        transition = step.state @ transition
        kernel[:, :j] = step.state @ kernel[:, :j]
        kernel[:, j] = step.token
    return Unrolled(transition, kernel)


def _step(
    a: Float64[np.ndarray, "N N"],
    b: Float64[np.ndarray, " N"],
    k: int,
    method: Method,
) -> Step:
    """Discretises checked arguments; see `step_matrices`."""
    eye = np.eye(len(b))
    rate, gain = a / (k + 1), b / (k + 1)
    match method:
        case "zoh":
            state = np.zeros_like(a)
            if k > 0:
                state = scipy.linalg.expm(a * np.log(k / (k + 1)))
            return Step(state, _solve(a, (eye - state) @ b))
        case "forward":
            return Step(eye - rate, gain)
        case "backward":
            return Step(_solve(eye + rate, eye), _solve(eye + rate, gain))
        case "bilinear":
            implicit = eye + rate / 2
            return Step(_solve(implicit, eye - rate / 2), _solve(implicit, gain))


def _solve(lower: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Solves lower @ x = right for a lower-triangular matrix."""
    return scipy.linalg.solve_triangular(lower, right, lower=True)
