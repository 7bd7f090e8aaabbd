"""Means, standard errors and intervals against numbers worked out by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from memjax.evaluation.statistics import interval, paired, standard_error


def test_standard_error_is_by_n_minus_one():
    # Deviations -1, 0, 1: variance 2 / 2, over three values.
    assert standard_error([1.0, 2.0, 3.0]) == pytest.approx(1 / math.sqrt(3))
    assert math.isnan(standard_error([1.0])) and math.isnan(standard_error([]))


def test_interval_is_student_t():
    mean, low, high = interval([1.0, 2.0, 3.0])
    # Quantile 0.975 with two degrees of freedom: 4.3027.
    assert mean == 2 and high - mean == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert mean - low == pytest.approx(high - mean)
    with pytest.raises(ValueError, match="values must hold at least one"):
        interval([])


def test_interval_of_one_value_is_unknown():
    found = interval([5.0])
    assert found.mean == 5 and math.isnan(found.low) and not found.excludes_zero


def test_pairing_cancels_what_texts_have_in_common():
    hard = np.asarray([1.0, 5.0, 9.0, 2.0])
    saved = np.asarray([0.1, 0.12, 0.08, 0.1])
    found = paired(hard, hard - saved)
    assert found.mean == pytest.approx(0.1) and found.excludes_zero
    assert paired(hard - saved, hard).high < 0
    with pytest.raises(ValueError, match="as many, got 4 and 3"):
        paired(hard.tolist(), hard[:3].tolist())


def test_interval_of_pairs_is_that_of_the_t_test():
    base, other = np.random.default_rng(0).normal(size=(2, 7))
    low, high = stats.ttest_rel(base, other).confidence_interval()
    expected = ((base - other).mean(), low, high)
    np.testing.assert_allclose(paired(base, other), expected)
