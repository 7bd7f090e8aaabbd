"""Plots of evaluations and of training, in the style of `drawing.py`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from memjax.config_io import AnyPath
from memjax.evaluation.drawing import COLOURS, GREY, drawing, log_ticks


def loss_by_position(
    curves: Mapping[str, Sequence[float]],
    edges: Sequence[int],
    path: AnyPath,
    *,
    window: int | None = None,
    title: str = "",
    source: str = "",
) -> None:
    """Draws mean loss against position in the text, one step line a model.

    With several models a second panel shows each one's loss difference to the first.

    Args:
        curves: nats by bin, by name.
        edges: bin edges in tokens, one more than values; drawn on a log scale.
        path: the PNG to write.
        window: marked by a vertical line.
        title: of the plot.
        source: device and commit, small in a corner.
    """
    rows = 2 if len(curves) > 1 else 1
    # A log axis has no 0: the first bin is drawn from half its end.
    bins = [max(edges[0], edges[1] / 2), *edges[1:]]
    # Savings are against the first model.
    base, *_ = (np.asarray(values) for values in curves.values())
    # Labels are stacked to the right of a panel.
    panel = max(3.0 if rows > 1 else 4.0, 0.16 * len(curves) + 0.8)
    size = (7.5, rows * panel)
    with drawing(
        path, rows=rows, size=size, title=title, source=source, sharex=True
    ) as plot:
        top, bottom = plot.grid[0, 0], plot.grid[-1, 0]
        for i, (name, values) in enumerate(curves.items()):
            plot.steps(top, values, bins, name, i, named=rows > 1)
            if i:
                plot.steps(bottom, base - np.asarray(values), bins, name, i)
        for axes in plot.grid[:, 0]:
            log_ticks(axes, edges[1:])
            if window is not None:
                axes.axvline(window, color=GREY, linestyle="--", linewidth=1)
        if window is not None:
            # Above the panel, where no line can be.
            place = {"transform": top.get_xaxis_transform(), "color": GREY}
            top.text(window, 1.02, f"window of {window} tokens", **place)
        if bottom is not top:
            bottom.axhline(0, color="0.3", linewidth=1)
            bottom.set_ylabel(f"nats saved against\n{next(iter(curves))}")
        bottom.set_xlabel("position in the text (tokens)")
        top.set_ylabel("loss (nats per token)")


def perplexity_by_length(
    curves: Mapping[str, Sequence[float]],
    lengths: Sequence[int],
    path: AnyPath,
    *,
    title: str = "",
    source: str = "",
) -> None:
    """Draws perplexity against the length of the input, one line a model.

    Args:
        curves: one value a length, by name; NaN where there is none.
        lengths: tokens, drawn on a log scale.
        path: the PNG to write.
        title: of the plot.
        source: device and commit, small in a corner.
    """
    with drawing(path, title=title, source=source) as plot:
        axes = plot.grid[0, 0]
        for i, (name, values) in enumerate(curves.items()):
            plot.line(axes, lengths, values, name, i)
        log_ticks(axes, lengths)
        axes.set(xlabel="input length (tokens)", ylabel="perplexity")


def accuracy_by_distance(
    curves: Mapping[str, Sequence[tuple[float, float, float]]],
    distances: Sequence[int],
    path: AnyPath,
    *,
    title: str = "",
    source: str = "",
) -> None:
    """Draws the share of right answers against how long ago the fact was injected.

    M+, Figures 3, 5, 8 and 9, with intervals.

    Args:
        curves: share and both ends of its interval, one a distance, by name; a share
            that is NaN is left out.
        distances: tokens injected since, from 0 on.
        path: the PNG to write.
        title: of the plot.
        source: device and commit, small in a corner.
    """
    # Side by side, so that intervals at one distance do not hide each other.
    spread = 0.014 * max(max(distances), 1)
    with drawing(path, size=(8, 5.2), title=title, source=source) as plot:
        axes = plot.grid[0, 0]
        for i, (name, values) in enumerate(curves.items()):
            share, low, high = np.asarray(values, float).T
            beside = np.asarray(distances) + spread * (i - (len(curves) - 1) / 2)
            # An end of the interval may round past its share, and matplotlib refuses
            # negative bars.
            errors = np.maximum([share - low, high - share], 0)
            plot.line(axes, beside, share, name, i, errors=errors)
        axes.set_ylim(-0.03, 1.03)
        axes.set_xticks(distances, [f"{distance:,}" for distance in distances])
        axes.set(xlabel="tokens injected since", ylabel="right answers")


#: Number of points from which a running mean over a twentieth of them is drawn.
MANY = 60


def training_curves(
    train: Sequence[tuple[int, float]],
    validation: Sequence[tuple[int, float]],
    rates: Sequence[tuple[int, float]],
    path: AnyPath,
    *,
    title: str = "",
    source: str = "",
) -> None:
    """Draws losses of a run against the step, and below them the learning rate.

    Args:
        train: step and loss in nats a token.
        validation: step and loss of held-out documents, likewise; may be empty.
        rates: step and learning rate; may be empty.
        path: the PNG to write.
        title: of the plot.
        source: device and commit, small in a corner.
    """
    panels: Any = {"gridspec_kw": {"height_ratios": [3, 1]}} if rates else {}
    rows = 2 if rates else 1
    with drawing(
        path, rows=rows, title=title, source=source, sharex=True, **panels
    ) as plot:
        top, bottom = plot.grid[0, 0], plot.grid[-1, 0]
        steps, losses = np.asarray(train, float).reshape(-1, 2).T
        bare: Any = {}
        if len(steps) >= MANY:
            bare, width = {"marker": None}, len(steps) // 20
            top.plot(steps, losses, color=COLOURS[0], linewidth=0.7, alpha=0.4)
            losses = np.convolve(losses, np.full(width, 1 / width), "valid")
            steps = steps[width - 1 :]
        plot.line(top, steps, losses, "training", 0, **bare)
        if validation:
            held_out = np.asarray(validation, float)
            plot.line(top, held_out[:, 0], held_out[:, 1], "validation", 1)
        top.set_ylabel("loss (nats per token)")
        if rates:
            at, rate = np.asarray(rates, float).T
            bottom.plot(at, rate, color=COLOURS[2])
            bottom.set_ylabel("learning\nrate")
            bottom.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        bottom.set_xlabel("step")
