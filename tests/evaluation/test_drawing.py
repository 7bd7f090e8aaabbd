"""The style of plots: names at the ends of lines that do not overlap."""

import itertools

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

from memjax.evaluation.drawing import (
    COLOURS,
    Drawing,
    apart,
    line_style,
    short_count,
    source_of,
)


@pytest.mark.parametrize(
    "wanted,sizes,expected",
    [
        ([0.1, 0.9], [0.2, 0.2], [0.1, 0.9]),
        ([0.5, 0.5], [0.2, 0.2], [0.4, 0.6]),
        ([0.6, 0.5], [0.2, 0.2], [0.65, 0.45]),
        # The third touches what the first two have become.
        ([0.5, 0.5, 0.65], [0.2, 0.2, 0.2], [0.35, 0.55, 0.75]),
        # A name of two lines.
        ([0.5, 0.5], [0.4, 0.2], [0.4, 0.7]),
    ],
)
def test_labels_are_near_their_lines_and_apart(wanted, sizes, expected):
    found = apart(wanted, sizes)
    np.testing.assert_allclose(found, expected)


def test_labels_of_lines_with_one_end_do_not_overlap():
    figure = Figure(figsize=(6, 4), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    plot = Drawing(figure, figure.subplots(1, 1, squeeze=False))
    axes = plot.grid[0, 0]
    for i in range(6):
        # The last value is missing: the name stands at the last one there is.
        plot.line(axes, [1, 2, 3], [i, 1.0, float("nan")], f"line {i}", i)
    plot.place_names()
    canvas.draw()
    texts = [x for x in axes.get_children() if isinstance(x, Annotation)]
    assert {text.xy for text in texts} == {(2.0, 1.0)}
    boxes = [Text.get_window_extent(text) for text in texts]
    for one, other in itertools.combinations(boxes, 2):
        apart_by = max(one.y0, other.y0) - min(one.y1, other.y1)
        assert apart_by > -2, "the letters of two names overlap"
    inside = figure.bbox
    assert all(box.x1 <= inside.x1 and box.y1 <= inside.y1 for box in boxes)


def test_lines_differ_without_their_colours():
    styles = [line_style(i) for i in range(14)]
    assert len({(s["marker"], s["linestyle"]) for s in styles}) == 14
    assert len({(s["color"], s["linestyle"]) for s in styles}) == 14
    assert styles[0]["color"] == styles[len(COLOURS)]["color"]


def test_counts_of_tokens_are_short():
    counts = [16, 1000, 2048, 100_000, 2**20]
    assert [*map(short_count, counts)] == ["16", "1000", "2k", "100k", "1M"]


def test_a_result_says_its_device_and_commit():
    assert source_of({"device": "a chip", "commit": "abc", "x": 1}) == "a chip · abc"
    assert source_of({"commit": None}) == ""
    changed = {"commit": "abc", "clean": False}
    assert source_of(changed) == "abc with changes"
    assert source_of(changed | {"clean": True}) == "abc"
