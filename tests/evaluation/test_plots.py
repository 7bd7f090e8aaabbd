"""Plots are PNG files of the curves."""

import struct

import numpy as np
import pytest

from memjax.evaluation.plots import (
    accuracy_by_distance,
    loss_by_position,
    perplexity_by_length,
)


def read_png(path):
    """Width and height; the signature and the last chunk must be there."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[-8:-4] == b"IEND"
    return struct.unpack(">II", data[16:24])


@pytest.mark.parametrize("edges", [[0, 16, 32, 50], [0, 3], [8, 16, 20]])
def test_curves_become_a_png(tmp_path, edges):
    values = list(np.linspace(3, 2, len(edges) - 1))
    path = tmp_path / "plot.png"
    loss_by_position({"a": values, "b": values}, edges, path, window=12, title="t")
    width, height = read_png(path)
    assert width > height > 100


def test_a_bin_without_tokens_is_a_gap(tmp_path):
    path = tmp_path / "plot.png"
    loss_by_position({"a": [3.0, float("nan"), 2.0]}, [0, 16, 32, 64], path)
    read_png(path)


def test_the_picture_shows_the_numbers(tmp_path):
    files = [tmp_path / name for name in ("a.png", "b.png", "c.png")]
    for path, values in zip(files, ([3.0, 2.0], [3.0, 2.0], [3.0, 1.0]), strict=True):
        loss_by_position({"a": values}, [0, 16, 32], path)
    one, same, other = (path.read_bytes() for path in files)
    assert one == same != other


def test_lines_by_length_become_a_png(tmp_path):
    path = tmp_path / "lines.png"
    curves = {"a": [3.0, 2.0, 1.5], "b": [3.0, float("nan"), 2.0]}
    perplexity_by_length(curves, [2048, 4096, 8192], path, title="t")
    width, height = read_png(path)
    assert width > height > 100


def test_accuracy_by_distance_becomes_a_png(tmp_path):
    files = [tmp_path / name for name in ("a.png", "b.png")]
    curve = [(1.0, 0.8, 1.0), (0.0, 0.0, 0.2), (float("nan"), 0.0, 1.0)]
    accuracy_by_distance({"a": curve}, [0, 512, 1024], files[0], title="t")
    accuracy_by_distance({"a": curve, "b": curve[::-1]}, [0, 512, 1024], files[1])
    for path in files:
        width, height = read_png(path)
        assert width > height > 100
    accuracy_by_distance({"alone": [(0.5, 0.1, 0.9)]}, [0], files[0])
    assert files[0].read_bytes() != files[1].read_bytes()
