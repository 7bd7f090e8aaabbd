"""Reconstruction of a signal from its HiPPO-LegS state (Elastic Memory, table 12).

    python -m experiments.elastic.reconstruction

A signal of 1024 tokens is compressed to N Legendre coefficients and read back at the
middle of every token, (k + 1/2) / 1024; reported is the mean squared error over 50
signals. The paper prints neither its signals nor its reading points. Here a signal is a
sum of A sin(2 pi w t + phi), t = k / 1024, with w uniform in [1, 5] (a state of order
32 resolves about 32 / pi cycles), A in [0.5, 1] and phi in [0, 2 pi], or standard
normal noise.

Zero-order hold is exact and has a closed form. The approximations of the recurrence
    d/dt c = -(1/t) A c + (1/t) B f,   A[n, m] = sqrt((2n+1)(2m+1)) (m < n), n+1 (m = n)
are multiplied out token by token in float64, 1/t taken at the end of the token as in
the HiPPO authors' program (Gu et al. 2020, appendix B.3).

What this does not show: forward Euler in a lower precision, whose coefficients pass
1e17 over the first tokens before its factors 1 - (n+1)/(k+1) vanish.
"""

from typing import Any, NamedTuple

import numpy as np
import scipy.linalg

from experiments.lab.results import RESULTS, Rows, show, table, write_report
from memjax_kernels import hippo_reconstruction
from memjax_kernels._src.hippo.bank import block_kernel

LENGTH, SEEDS, CYCLES = 1024, 50, (1.0, 5.0)


class Case(NamedTuple):
    """A row of table 12; `waves` is 0 for noise, `paper` the printed error."""

    waves: int
    order: int
    method: str
    paper: float


TABLE_12 = (
    Case(1, 32, "zoh", 1.2e-5),
    Case(3, 32, "zoh", 2.3e-4),
    Case(5, 32, "zoh", 9.8e-4),
    Case(5, 32, "forward", 3.3e-3),
    Case(5, 32, "backward", 2.9e-3),
    Case(5, 32, "bilinear", 4.8e-4),
    Case(0, 32, "zoh", 0.97),
    Case(0, 128, "zoh", 0.90),
    Case(0, 512, "zoh", 0.72),
)


def signal_of(waves: int, seed: int) -> np.ndarray:
    """A sum of so many sines, or noise."""
    rng = np.random.default_rng([seed, waves])
    if waves == 0:
        return rng.standard_normal(LENGTH)
    cycles = rng.uniform(*CYCLES, waves)
    heights = rng.uniform(0.5, 1.0, waves)
    phases = rng.uniform(0, 2 * np.pi, waves)
    t = np.arange(LENGTH)[:, None] / LENGTH
    return np.sin(2 * np.pi * cycles * t + phases) @ heights


def compress(signal: np.ndarray, order: int, method: str) -> np.ndarray:
    """The state [N, S] after the signal [T, S]."""
    if method == "zoh":
        return block_kernel(order, 0, len(signal)) @ signal
    b = np.sqrt(2 * np.arange(order) + 1)
    a = np.tril(np.outer(b, b), -1) + np.diag(np.arange(order) + 1.0)
    eye, state = np.eye(order), np.zeros((order, signal.shape[1]))
    # c_k = (I + implicit A/(k+1))^-1 ((I - (1 - implicit) A/(k+1)) c + B/(k+1) f)
    implicit = {"forward": 0.0, "bilinear": 0.5, "backward": 1.0}[method]
    for k, token in enumerate(signal):
        rate, gain = a / (k + 1), b / (k + 1)
        right = (eye - (1 - implicit) * rate) @ state + np.outer(gain, token)
        left = eye + implicit * rate
        state = scipy.linalg.solve_triangular(left, right, lower=True)
    return state


def measure(case: Case, seeds: int = SEEDS) -> dict[str, Any]:
    """The errors of a row over all seeds."""
    signal = np.stack([signal_of(case.waves, seed) for seed in range(seeds)], axis=1)
    state = compress(signal, case.order, case.method)
    middles = (np.arange(LENGTH) + 0.5) / LENGTH
    read = hippo_reconstruction(case.order, middles) @ state
    errors = np.mean((read - signal) ** 2, axis=0)
    kind = f"{case.waves} sine" if case.waves else "noise"
    return case._asdict() | {
        "name": f"{kind}, N={case.order}, {case.method}",
        "mse_median": float(np.median(errors)),
        "mse_min": float(errors.min()),
        "mse_max": float(errors.max()),
    }


def main() -> None:
    """Measures, prints and writes the results."""
    rows = [measure(case) for case in TABLE_12]
    question = "table 12 of Elastic Memory: MSE of reconstruction"
    used = {"length": LENGTH, "seeds": SEEDS, "cycles": CYCLES}
    output = RESULTS / "elastic" / "reconstruction"
    show(
        question,
        reconstruction.rows(write_report(output, question, used, {"rows": rows})),
    )


@table("elastic/reconstruction")
def reconstruction(result: dict[str, Any]) -> Rows:
    """Errors of every row of table 12."""
    for row in result["rows"]:
        yield {
            "signal": row["name"],
            "MSE in the paper": f"{row['paper']:.1e}",
            "ours, median": f"{row['mse_median']:.1e}",
            "least": f"{row['mse_min']:.1e}",
            "greatest": f"{row['mse_max']:.1e}",
        }


if __name__ == "__main__":
    main()
