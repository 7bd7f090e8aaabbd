"""Means of measurements, their standard errors, and 95% intervals by Student's t.

Measurements count as independent: several texts of one document are less so. Models
are compared in pairs, on the same texts or with the same seeds, so that what makes one
text harder than another cancels.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit

Values = Sequence[float] | Float[np.ndarray, " N"]


class Interval(NamedTuple):
    """A mean with its 95% interval [low, high], NaN where there is only one value."""

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of zero."""
        return self.low > 0 or self.high < 0


def standard_error(values: Values) -> float:
    """Standard error of the mean of N values; NaN for fewer than two."""
    found = np.asarray(values, np.float64)
    if len(found) < 2:
        return math.nan
    # N - 1, as the mean is estimated from the same values.
    return float(found.std(ddof=1) / math.sqrt(len(found)))


def interval(values: Values) -> Interval:
    """The mean of N values with its 95% interval, by Student's t with N - 1.

    Raises:
        ValueError: if there are no values.
    """
    found = np.asarray(values, np.float64)
    if not len(found):
        raise ValueError("values must hold at least one, got none")
    mean = float(found.mean())
    # Of one value the interval is NaN, whatever the quantile.
    half = float(stdtrit(max(len(found) - 1, 1), 0.975)) * standard_error(found)
    return Interval(mean, mean - half, mean + half)


def paired(base: Values, other: Values) -> Interval:
    """The mean of base - other over N pairs, with its 95% interval.

    Of losses it is what `other` saves: above zero it is the better one.

    Raises:
        ValueError: if there are no pairs, or not as many of both.
    """
    if len(base) != len(other):
        raise ValueError(
            f"base and other must be as many, got {len(base)} and {len(other)}"
        )
    return interval(np.asarray(base, np.float64) - np.asarray(other, np.float64))
