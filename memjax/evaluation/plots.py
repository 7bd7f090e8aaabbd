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

    Args:
        curves: nats by bin, by name.
        edges: bin edges in tokens, one more than values; drawn on a log scale.
        path: the PNG to write.
        window: marked by a vertical line.
        title: of the plot.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    # A log axis has no 0: the first bin is drawn from half its end.
    left = max(edges[0], edges[1] / 2)
    for name, values in curves.items():
        axes.stairs(np.asarray(values), [left, *edges[1:]], label=name, linewidth=1.8)
    axes.set_xscale("log", base=2)
    if window is not None:
        axes.axvline(window, color="0.5", linestyle="--", linewidth=1)
        axes.annotate(
            f" window of {window} tokens",
            (window, 0.97),
            xycoords=("data", "axes fraction"),
            color="0.4",
        )
    axes.set_xticks(edges[1:], [f"{edge:,}" for edge in edges[1:]])
    axes.minorticks_off()
    axes.set_xlabel("position in the text (tokens)")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    FigureCanvasAgg(figure).print_png(path)
