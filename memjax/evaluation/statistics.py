"""Standard errors and 95% confidence intervals of paired differences between models.

Pairs are the same texts or seeds, so that the difficulty of a text cancels.

`loss_difference_by_document` bootstraps over documents, as tokens and texts of one
document are not independent. `interval` and `paired` use Student's t, for independent
values such as those of several seeds.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float64
from scipy.special import ndtr, stdtrit

from memjax.checks import require_instance
from memjax.evaluation.losses import TokenLosses

#: Minimum number of documents of a kind for an interval.
MIN_DOCUMENTS = 5
#: Bootstrap resamples; the ends of the intervals need thousands.
RESAMPLES = 10_000
Values = Sequence[float] | Float[np.ndarray, " N"]


class Interval(NamedTuple):
    """A mean with its 95% interval [low, high], NaN where there is only one value."""

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval excludes zero."""
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

    Of losses: above zero `other` is the better model.

    Raises:
        ValueError: if there are no pairs, or the lengths differ.
    """
    if len(base) != len(other):
        raise ValueError(
            f"base and other must be as many, got {len(base)} and {len(other)}"
        )
    return interval(np.asarray(base, np.float64) - np.asarray(other, np.float64))


class LossDifference(NamedTuple):
    """Loss difference of two models in nats per token, with its 95% interval.

    Attributes:
        nats: mean over all targets; above zero the model is the better one.
        low: lower end.
        high: upper end.
        standard_error: of `nats`.
        documents: how many there are.
    """

    nats: float
    low: float
    high: float
    standard_error: float
    documents: int

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


def mean_loss_difference(base: TokenLosses, model: TokenLosses) -> float:
    """Mean of base - model over all targets; NaN without targets.

    Raises:
        ValueError: if they are not losses of the same targets.
    """
    totals = _totals(base, model)
    if not totals.kinds:
        return math.nan
    return float(totals.saved.sum() / totals.targets.sum())


def loss_difference_by_document(
    base: TokenLosses, model: TokenLosses, *, seed: int = 0
) -> LossDifference:
    """Mean of base - model over all targets, with a bootstrap interval over documents.

    Documents are resampled within each kind. With few documents plain percentiles make
    intervals too narrow; they are expanded as Student's t would (Hesterberg 2015, "What
    Teachers Should Know About the Bootstrap", https://arxiv.org/abs/1411.5279).

    Args:
        base: losses of the reference model.
        model: losses of the same targets.
        seed: of the resampling.

    Raises:
        ValueError: if they are not losses of the same targets, there are none, or there
            are fewer than `MIN_DOCUMENTS` documents of a kind.
    """
    totals = _totals(base, model)
    if not totals.kinds:
        raise ValueError("base and model must have targets, got none")
    kinds = np.asarray(totals.kinds)
    random, sums = np.random.default_rng(seed), np.zeros((2, RESAMPLES))
    for kind in sorted(set(totals.kinds)):
        values = np.stack([totals.saved, totals.targets])[:, kinds == kind]
        count = values.shape[1]
        if count < MIN_DOCUMENTS:
            raise ValueError(
                f"an interval needs at least {MIN_DOCUMENTS} documents of a kind, "
                f"got {count} of {kind!r}"
            )
        # How often each document is drawn.
        drawn = random.multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
        sums += values @ drawn.T
    means = sums[0] / sums[1]
    free = len(kinds) - len(set(totals.kinds))
    # A sample varies less about its own mean than about the true one.
    wider = math.sqrt(len(kinds) / free)
    tail = float(ndtr(-wider * stdtrit(free, 0.975)))
    low, high = np.quantile(means, [tail, 1 - tail])
    return LossDifference(
        nats=float(totals.saved.sum() / totals.targets.sum()),
        low=float(low),
        high=float(high),
        standard_error=float(wider * means.std(ddof=1)),
        documents=len(kinds),
    )


class _Totals(NamedTuple):
    """Loss difference in nats and number of targets of each of D documents."""

    saved: Float64[np.ndarray, " D"]
    targets: Float64[np.ndarray, " D"]
    kinds: tuple[str, ...]


def _totals(base: TokenLosses, model: TokenLosses) -> _Totals:
    require_instance("base", base, TokenLosses)
    require_instance("model", model, TokenLosses)
    same = base.documents == model.documents and base.kinds == model.kinds
    if not same or not np.array_equal(base.mask, model.mask):
        raise ValueError("base and model must be losses of the same targets")
    saved = (base.nll.astype(np.float64) - model.nll).sum(axis=1)
    targets = base.mask.sum(axis=1, dtype=np.float64)
    found: dict[tuple[str, str], Float64[np.ndarray, " 2"]] = {}
    for row in np.flatnonzero(targets):
        # Documents of two kinds may share a name.
        key = (base.kinds[row], base.documents[row])
        found[key] = found.get(key, np.zeros(2)) + (saved[row], targets[row])
    totals = np.stack([np.zeros(2), *found.values()])[1:]
    return _Totals(totals[:, 0], totals[:, 1], tuple(kind for kind, _ in found))
