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
