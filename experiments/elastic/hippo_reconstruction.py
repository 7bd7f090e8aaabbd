"""How well does a HiPPO state give a signal back? Elastic Memory, table 12.

    python -m experiments.elastic.hippo_reconstruction

Compresses a signal of `length` tokens to `order` Legendre coefficients, reads it
back at every token and takes the mean squared error. About 3 seconds on a CPU.

The paper does not print its signals. Ours, one set per seed, not fitted to its
figures: t = k / length, sum of A sin(2 pi w t + phi) with w uniform in
[min_cycles, max_cycles] cycles per history, A in [0.5, 1], phi in [0, 2 pi]; noise is
standard normal. Nor does it print where it reads. Token k fills
[k, k+1] / length, so we read at its middle, (k + 1/2) / length; the column `edge`
reads at k / length, the paper's uniform sampling, half a token early.

Forward Euler is unstable over the first tokens, where its factors 1 - (n+1)/(k+1)
are large: on the way the coefficients pass 1e17 (`forward_peak`), and only because
the factors then vanish in turn do they come back. So its row is a float64 figure.
"""

import dataclasses
import pathlib

import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common.results import RESULTS, settings, write_report
from experiments.elastic import discretisations
from memjax_kernels.hippo import bank


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that changes the result."""

    length: int = 1024
    """Tokens in a signal."""
    seeds: int = 50
    """Signals per row; at least 1."""
    min_cycles: float = 1.0
    """Slowest sine, in cycles per history."""
    max_cycles: float = 5.0
    """Fastest sine; an order-32 state runs out near 32 / pi = 10 cycles."""
    output: pathlib.Path = RESULTS / "elastic" / "hippo_reconstruction"
    """Where the .json and .png go, without the ending."""

    def __post_init__(self) -> None:
        """Refuses values that give no table."""
        if self.length < 1 or self.seeds < 1:
            raise ValueError(
                f"length and seeds must be at least 1, got {self.length}, {self.seeds}"
            )
        if not 0 < self.min_cycles <= self.max_cycles:
            raise ValueError(
                "min_cycles must be above 0 and at most max_cycles, got "
                f"{self.min_cycles}, {self.max_cycles}"
            )


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of table 12; `waves` is 0 for noise, `paper` the printed error."""

    waves: int
    order: int
    method: discretisations.Method
    paper: float

    @property
    def name(self) -> str:
        """Words for the table and the plot."""
        kind = f"{self.waves} sine" if self.waves else "noise"
        return f"{kind}, N={self.order}, {self.method}"


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


def signals(config: Config, waves: int) -> np.ndarray:
    """Draws [T, S], one signal per seed; equal for equal `waves`."""
    return np.stack([_signal(config, waves, s) for s in range(config.seeds)], axis=1)


def compress(signal: np.ndarray, case: Case) -> np.ndarray:
    """Returns the state [N, S]: the bank for zero-order hold, else the recurrence."""
    if case.method == "zoh":
        return bank.block_kernel(case.order, 0, len(signal)) @ signal
    return discretisations.compress(signal, case.order, case.method)


def read(state: np.ndarray, length: int, offset: float) -> np.ndarray:
    """Reads [N, S] back at (k + offset) / length for every token k: [T, S]."""
    points = (np.arange(length) + offset) / length
    return bank.reconstruction(len(state), points) @ state


def measure(config: Config, case: Case) -> dict:
    """Measures one row over all seeds."""
    signal = signals(config, case.waves)
    state = compress(signal, case)
    errors, edge_errors = (
        np.mean((read(state, config.length, offset) - signal) ** 2, axis=0)
        for offset in (0.5, 0.0)
    )
    return dataclasses.asdict(case) | {
        "name": case.name,
        "mse_median": float(np.median(errors)),
        "mse_min": float(errors.min()),
        "mse_max": float(errors.max()),
        "mse_median_read_at_edge": float(np.median(edge_errors)),
        "signal_power_median": float(np.median(np.mean(signal**2, axis=0))),
        "mse": errors.tolist(),
    }


def recurrence_gap(config: Config) -> float:
    """Returns the largest difference of bank and expm recurrence at order 32."""
    signal = signals(config, 5)
    exact = bank.block_kernel(32, 0, config.length) @ signal
    return float(np.abs(exact - discretisations.compress(signal, 32)).max())


def forward_peak(config: Config) -> float:
    """Returns the largest coefficient forward Euler passes through, 5 sine, N=32."""
    signal = signals(config, 5)
    state, peak = np.zeros((32, config.seeds)), 0.0
    for k, token in enumerate(signal):
        step = discretisations.step_matrices(32, k, "forward")
        state = step.state @ state + np.outer(step.token, token)
        peak = max(peak, float(np.abs(state).max()))
    return peak


def main(config: Config) -> None:
    """Measures, prints the table and writes the results."""
    rows = [measure(config, case) for case in TABLE_12]
    print(f"{'signal':24}{'paper':>9}{'ours':>9}{'min':>9}{'max':>9}{'edge':>9}")
    for row in rows:
        names = ("paper", "mse_median", "mse_min", "mse_max", "mse_median_read_at_edge")
        print(f"{row['name']:24}" + "".join(f"{row[n]:9.1e}" for n in names))
    gap = recurrence_gap(config)
    print(f"ours: median of {config.seeds} signals; edge: read half a token early")
    print(f"bank against the expm recurrence, 5 sine, N=32: {gap:.1e}")
    peak = forward_peak(config)
    print(f"largest coefficient on the way of forward Euler, N=32: {peak:.1e}")
    measured = {"bank_minus_recurrence": gap, "forward_peak": peak, "rows": rows}
    question = "table 12 of Elastic Memory: MSE of reconstruction"
    write_report(config.output, question, settings(config), measured)
    plot(config, rows).savefig(f"{config.output}.png", dpi=110)


def plot(config: Config, rows: list[dict]) -> Figure:
    """Draws seed 0 of two rows, the errors of four methods, and the table."""
    figure = Figure(figsize=(13, 8.5), layout="constrained")
    axes = figure.subplots(2, 2)
    _plot_sines(config, axes[0, 0], axes[1, 0])
    _plot_noise(config, axes[0, 1])
    _plot_table(axes[1, 1], rows)
    return figure


def _plot_sines(config: Config, above: Axes, below: Axes) -> None:
    signal = signals(config, 5)[:, :1]
    above.plot(signal, color="0.75", linewidth=5, label="5 sines")
    styles = {"zoh": "k--", "forward": "C3", "backward": "C0", "bilinear": "C2"}
    for case in (case for case in TABLE_12 if case.waves == 5):
        back = read(compress(signal, case), config.length, 0.5)
        style = styles[case.method]
        above.plot(back, style, linewidth=1, label=case.method)
        error = np.abs(back - signal)
        below.semilogy(error, style, linewidth=1, label=case.method)
    above.set(title="5 sines, N=32, seed 0", xlabel="token", ylabel="signal")
    below.set(
        title="its absolute error", xlabel="token", ylabel="|error|", ylim=(1e-9, None)
    )
    above.legend(ncols=2)
    below.legend(ncols=2, loc="lower center")


def _plot_noise(config: Config, axes: Axes) -> None:
    signal = signals(config, 0)[:, :1]
    shown = slice(config.length * 7 // 16, config.length * 9 // 16)
    tokens = np.arange(config.length)[shown]
    axes.plot(tokens, signal[shown], color="0.75", linewidth=3, label="noise")
    for case in (case for case in TABLE_12 if case.waves == 0):
        back = read(compress(signal, case), config.length, 0.5)
        axes.plot(tokens, back[shown], linewidth=1.2, label=f"N={case.order}")
    axes.set(
        title="noise, zero-order hold, seed 0, middle of the history",
        xlabel="token",
        ylabel="signal",
    )
    axes.legend(ncols=2)


def _plot_table(axes: Axes, rows: list[dict]) -> None:
    positions = np.arange(len(rows))
    ours = np.array([row["mse_median"] for row in rows])
    ends = np.array(
        [[row["mse_min"] for row in rows], [row["mse_max"] for row in rows]]
    )
    axes.barh(positions - 0.27, [row["paper"] for row in rows], 0.26, label="paper")
    axes.barh(
        positions,
        ours,
        0.26,
        xerr=np.abs(ends - ours),
        capsize=2,
        label="ours, median and range",
    )
    edge = [row["mse_median_read_at_edge"] for row in rows]
    axes.barh(positions + 0.27, edge, 0.26, label="ours read half a token early")
    axes.set_xscale("log")
    axes.set_yticks(positions, [row["name"] for row in rows])
    axes.invert_yaxis()
    axes.set(title="table 12", xlabel="mean squared error (log)")
    axes.legend(
        ncols=3, fontsize="small", loc="lower center", bbox_to_anchor=(0.4, -0.25)
    )


def _signal(config: Config, waves: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, waves])
    if waves == 0:
        return rng.standard_normal(config.length)
    cycles = rng.uniform(config.min_cycles, config.max_cycles, waves)
    heights = rng.uniform(0.5, 1.0, waves)
    phases = rng.uniform(0, 2 * np.pi, waves)
    t = np.arange(config.length)[:, None] / config.length
    return np.sin(2 * np.pi * cycles * t + phases) @ heights


if __name__ == "__main__":
    main(tyro.cli(Config))
