"""Reconstruction from a HiPPO state: methods, bounds of the paper, committed result."""

import numpy as np
import pytest

from experiments.elastic import reconstruction
from experiments.elastic.reconstruction import TABLE_12, compress
from experiments.lab.results import load


def test_bounds_of_the_paper_hold():
    for case in (x for x in TABLE_12 if x.method == "zoh" and x.order < 512):
        assert reconstruction.measure(case, seeds=10)["mse_median"] <= case.paper, case
    for row in load("elastic/reconstruction")["rows"]:
        assert row["mse_median"] <= row["paper"]


@pytest.mark.parametrize("method", ["forward", "backward", "bilinear"])
def test_approximations_approach_zero_order_hold(method):
    def error(tokens: int) -> float:
        t = (np.arange(tokens) + 0.5) / tokens
        signal = np.sin(2 * np.pi * t)[:, None]
        return np.abs(compress(signal, 6, method) - compress(signal, 6, "zoh")).max()

    assert error(400) < 0.6 * error(200) < 0.4 * error(100)


def test_first_token_of_every_method():
    for method, coefficient in (("forward", 1), ("backward", 0.5), ("bilinear", 2 / 3)):
        # N = 1: A = B = 1.
        assert compress(np.ones((1, 1)), 1, method) == pytest.approx(coefficient)
