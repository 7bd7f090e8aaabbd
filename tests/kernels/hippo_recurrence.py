"""HiPPO-LegS with zero-order hold as a token recurrence in float64: a test's reference.

    d/dt c = -(1/t) A c + (1/t) B f
    A[n, m] = sqrt((2n+1)(2m+1)) below the diagonal, n+1 on it;  B[n] = sqrt(2n+1)
    c_k = A_k c_{k-1} + B_k f_k,  A_k = (k/(k+1))**A,  B_k = A^-1 (I - A_k) B

One matrix exponential and one triangular solve per token; independent of the closed
form of `memjax_kernels`. Elastic Memory, equations 3, 4, 19 and 25.
"""

import numpy as np
import scipy.linalg
from jaxtyping import Float64


def legs_matrices(
    order: int,
) -> tuple[Float64[np.ndarray, "N N"], Float64[np.ndarray, " N"]]:
    """A and B of the equation above."""
    degrees = np.arange(order, dtype=np.float64)
    b = np.sqrt(2 * degrees + 1)
    return np.tril(np.outer(b, b), -1) + np.diag(degrees + 1), b


def unroll(
    order: int, start: int, stop: int
) -> tuple[Float64[np.ndarray, "N N"], Float64[np.ndarray, "N L"]]:
    """Transition and kernel of the block of tokens start to stop-1, equation 27."""
    a, b = legs_matrices(order)
    transition, kernel = np.eye(order), np.zeros((order, stop - start))
    for j, k in enumerate(range(start, stop)):
        state = np.zeros_like(a)
        if k > 0:
            state = scipy.linalg.expm(a * np.log(k / (k + 1)))
        right = (np.eye(order) - state) @ b
        transition = state @ transition
        kernel[:, :j] = state @ kernel[:, :j]
        kernel[:, j] = scipy.linalg.solve_triangular(a, right, lower=True)
    return transition, kernel


def compress(
    signal: Float64[np.ndarray, "T D"], order: int
) -> Float64[np.ndarray, "N D"]:
    """The state after a signal that starts at the empty memory."""
    return unroll(order, 0, len(signal))[1] @ signal
