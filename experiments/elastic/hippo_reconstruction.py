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
from typing import Any

import numpy as np
import tyro

from experiments.elastic import discretisations
from experiments.lab.results import RESULTS, figure, settings, write_report
from memjax.evaluation.drawing import (
    COLOURS,
    MARKERS,
    Drawing,
    drawing,
    source_of,
)
from memjax_kernels._src.hippo import bank


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
    return bank.hippo_reconstruction(len(state), points) @ state


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
    result = write_report(config.output, question, settings(config), measured)
    plot(result, pathlib.Path(f"{config.output}.png"))


@figure("elastic/hippo_reconstruction")
def plot(result: dict[str, Any], path: pathlib.Path) -> None:
    """Draws seed 0 of two rows, the errors of four methods, and the table."""
    config = Config(**result["config"])
    with drawing(
        path, rows=4, size=(8.5, 13), title="HiPPO-LegS", source=source_of(result)
    ) as drawn:
        above, below, noise, table = drawn.grid[:, 0]
        _plot_sines(config, drawn, above, below)
        _plot_noise(config, drawn, noise)
        _plot_table(drawn, table, result["rows"])


def _plot_sines(config: Config, drawn: Drawing, above: Any, below: Any) -> None:
    signal = signals(config, 5)[:, 0]
    tokens = np.arange(config.length)
    above.plot(tokens, signal, color="0.75", linewidth=5)
    drawn.name(above, tokens[-1], signal[-1], "5 sines", "0.6")
    for i, case in enumerate(case for case in TABLE_12 if case.waves == 5):
        back = read(compress(signal[:, None], case), config.length, 0.5)[:, 0]
        style = {"marker": None, "linewidth": 1.0}
        exact = case.method == "zoh"
        drawn.line(above, tokens, back, case.method, i, named=exact, **style)
        error = np.abs(back - signal)
        drawn.line(below, tokens, error, case.method, i, **style)
    above.set(title="5 sines, N=32, seed 0, and what four methods read back")
    above.set(ylabel="signal")
    below.set(title="absolute error of each", xlabel="token", ylabel="|error|")
    below.set(yscale="log", ylim=(1e-9, None))


def _plot_noise(config: Config, drawn: Drawing, axes: Any) -> None:
    signal = signals(config, 0)[:, :1]
    shown = slice(config.length * 7 // 16, config.length * 9 // 16)
    tokens = np.arange(config.length)[shown]
    axes.plot(tokens, signal[shown], color="0.75", linewidth=3)
    drawn.name(axes, tokens[-1], signal[shown][-1, 0], "noise", "0.6")
    for i, case in enumerate(case for case in TABLE_12 if case.waves == 0):
        back = read(compress(signal, case), config.length, 0.5)[shown, 0]
        drawn.line(axes, tokens, back, f"N={case.order}", i, marker=None)
    axes.set(title="noise, zero-order hold, seed 0, middle of the history")
    axes.set(xlabel="token", ylabel="signal")


def _plot_table(drawn: Drawing, axes: Any, rows: list[dict]) -> None:
    """Points, named beside those of the first row."""
    places = np.arange(len(rows))
    of = lambda name: np.array([row[name] for row in rows])
    ours = of("mse_median")
    ends = np.abs(np.array([of("mse_min"), of("mse_max")]) - ours)
    for i, (name, values, errors) in enumerate(
        (
            ("paper", of("paper"), None),
            ("ours, median and range", ours, ends),
            ("read half a token early", of("mse_median_read_at_edge"), None),
        )
    ):
        look = {"color": COLOURS[i], "marker": MARKERS[i], "linestyle": "none"}
        lines = places + 0.22 * (i - 1)
        axes.errorbar(values, lines, xerr=errors, **look)
        # Above the panel, where no value can lie.
        place = {"xycoords": "axes fraction", "color": COLOURS[i]}
        sign = "●■◆"[i]
        axes.annotate(f"{sign} {name}", (0.4 * i - 0.1 * (i > 0), 1.02), **place)
    axes.set_xscale("log")
    axes.set_yticks(places, [row["name"] for row in rows])
    axes.invert_yaxis()
    axes.set_title("table 12\n", loc="left")
    axes.set_xlabel("mean squared error")


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
