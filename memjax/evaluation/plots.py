"""Plots of evaluations."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np


def loss_by_position(
    curves: Mapping[str, Sequence[float]],
    edges: Sequence[int],
    path: Path,
    *,
    window: int | None = None,
    title: str = "",
) -> None:
    """Draws mean loss against position in the text, one step line a model.

    With several models a second panel shows what each saves against the first.

    Args:
        curves: nats by bin, by name.
        edges: bin edges in tokens, one more than values; drawn on a log scale.
        path: the PNG to write.
        window: marked by a vertical line.
        title: of the plot.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 6 if len(curves) > 1 else 4), layout="constrained")
    panels = figure.subplots(2 if len(curves) > 1 else 1, sharex=True, squeeze=False)
    top, bottom = panels[0, 0], panels[-1, 0]
    # A log axis has no 0: the first bin is drawn from half its end.
    bins = [max(edges[0], edges[1] / 2), *edges[1:]]
    # Savings are against the first model.
    base, *_ = (np.asarray(values) for values in curves.values())
    for i, (name, values) in enumerate(curves.items()):
        style = {"baseline": None, "linewidth": 1.8, "color": f"C{i}", "label": name}
        top.stairs(np.asarray(values), bins, **style)
        if i:
            bottom.stairs(base - np.asarray(values), bins, **style)
    for axes in panels[:, 0]:
        axes.set_xscale("log", base=2)
        axes.set_xticks(edges[1:], [f"{edge:,}" for edge in edges[1:]])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        if window is not None:
            axes.axvline(window, color="0.5", linestyle="--", linewidth=1)
    if window is not None:
        label = f" window of {window} tokens"
        place = (window, top.get_ylim()[1])
        top.annotate(label, place, color="0.4", verticalalignment="top")
    if bottom is not top:
        bottom.axhline(0, color="0.3", linewidth=1)
        bottom.set_ylabel(f"nats saved against\n{next(iter(curves))}")
    bottom.set_xlabel("position in the text (tokens)")
    top.set_ylabel("loss (nats per token)")
    top.set_title(title)
    top.legend()
    FigureCanvasAgg(figure).print_png(path)


def perplexity_by_length(
    curves: Mapping[str, Sequence[float]],
    lengths: Sequence[int],
    path: Path,
    *,
    title: str = "",
) -> None:
    """Draws perplexity against the length of the input, one line a model.

    Args:
        curves: one value a length, by name; NaN where there is none.
        lengths: tokens, drawn on a log scale.
        path: the PNG to write.
        title: of the plot.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, values in curves.items():
        axes.plot(lengths, values, marker="o", markersize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set(title=title, xlabel="input length (tokens)", ylabel="perplexity")
    axes.legend(fontsize="small")
    FigureCanvasAgg(figure).print_png(path)


def accuracy_by_distance(
    curves: Mapping[str, Sequence[tuple[float, float, float]]],
    distances: Sequence[int],
    path: Path,
    *,
    title: str = "",
) -> None:
    """Draws the share of right answers against how long ago the fact was injected.

    M+, Figures 3, 5, 8 and 9, with intervals.

    Args:
        curves: share and both ends of its interval, one a distance, by name; a share
            that is NaN is left out.
        distances: tokens injected since, from 0 on.
        path: the PNG to write.
        title: of the plot.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    # Side by side, so that intervals at one distance do not hide each other.
    spread = 0.006 * max(max(distances), 1)
    for i, (name, values) in enumerate(curves.items()):
        share, low, high = np.asarray(values, float).T
        real = ~np.isnan(share)
        positions = np.asarray(distances)[real] + spread * (i - (len(curves) - 1) / 2)
        share, low, high = share[real], low[real], high[real]
        # An end of the interval may round past its share, and matplotlib refuses
        # negative bars.
        errors = np.maximum([share - low, high - share], 0)
        style = {"marker": "o", "markersize": 3, "capsize": 2, "elinewidth": 0.8}
        axes.errorbar(positions, share, errors, label=name, **style)
    axes.set_ylim(-0.03, 1.03)
    axes.grid(alpha=0.3)
    axes.set(title=title, xlabel="tokens injected since", ylabel="right answers")
    axes.legend(fontsize="small")
    FigureCanvasAgg(figure).print_png(path)


def recall_histogram(
    panels: Mapping[str, tuple[np.ndarray, np.ndarray]],
    path: Path,
    *,
    longest: int = 50,
    title: str = "",
) -> None:
    """Draws how many segments back searches go, one panel an experiment.

    A line shows what searches that pick any memory alike would give (HMT, Figures 11,
    14 and 15).

    Args:
        panels: distances and memories held, as of `recall_distances`, by name.
        path: the PNG to write.
        longest: distances beyond are not drawn; a panel says how many there are.
        title: of the plot.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = 1 + 4.5 * len(panels)
    figure = Figure(figsize=(width, 3.8), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    back = np.arange(1, longest + 1)
    for axes, (name, (distances, held)) in zip(grid, panels.items(), strict=True):
        count = max(len(distances), 1)
        shares = [np.sum(distances == segments) / count for segments in back]
        chance = [np.sum((segments <= held) / held) / count for segments in back]
        axes.bar(back, shares, width=0.9, label="searches")
        axes.plot(back, chance, color="0.3", linewidth=1, label="any memory alike")
        beyond = np.mean(distances > longest) if len(distances) else 0.0
        axes.set_title(f"{name}\n{len(distances)} searches, {beyond:.0%} beyond")
        axes.set_xlabel("segments back")
        axes.grid(axis="y", alpha=0.3)
    grid[0].set_ylabel("share of searches")
    grid[-1].legend(fontsize="small")
    figure.suptitle(title)
    FigureCanvasAgg(figure).print_png(path)
