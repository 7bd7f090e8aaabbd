"""Differences between models with their intervals: by document, and by seed."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from memjax.evaluation import TokenLosses
from memjax.evaluation.statistics import (
    MIN_DOCUMENTS,
    loss_difference_by_document,
    mean_loss_difference,
)


def loss_difference(base: TokenLosses, model: TokenLosses) -> dict[str, Any]:
    """Loss of `base` minus loss of `model` in nats a token, as JSON has it.

    `low`, `high` and `standard_error` are None where a kind has too few documents.
    """
    counted = {
        (kind, name)
        for kind, name, targets in zip(
            base.kinds, base.documents, base.mask.sum(axis=1), strict=True
        )
        if targets
    }
    kinds = [kind for kind, _ in counted]
    found: dict[str, Any] = {"documents": len(counted)}
    if min(map(kinds.count, kinds), default=0) < MIN_DOCUMENTS:
        nats = mean_loss_difference(base, model)
        return found | {"nats": nats, "low": None, "high": None, "standard_error": None}
    return found | loss_difference_by_document(base, model)._asdict()


def format_interval(found: Mapping[str, Any], digits: int = 3) -> str:
    """A difference as text: "0.032 [0.011, 0.054]"."""
    if found["low"] is None:
        return f"{found['nats']:+.{digits}f} (too few documents)"
    low, high = (f"{found[name]:+.{digits}f}" for name in ("low", "high"))
    return f"{found['nats']:+.{digits}f} [{low}, {high}]"


def mean_losses(losses: Sequence[TokenLosses]) -> TokenLosses:
    """The mean over several seeds, of the same targets."""
    return losses[0]._replace(nll=np.mean([x.nll for x in losses], axis=0))


def select_kind(losses: TokenLosses, kind: str | None) -> TokenLosses:
    """The losses of texts of one kind; all of them for None."""
    if kind is None:
        return losses
    rows = [i for i, of in enumerate(losses.kinds) if of == kind]
    return TokenLosses(
        losses.nll[rows],
        losses.mask[rows],
        tuple(losses.kinds[i] for i in rows),
        tuple(losses.documents[i] for i in rows),
    )


def median_and_range(values: Sequence[float], digits: int = 2) -> str:
    """The median of some runs and their range as text: "0.98 (0.95 to 1.00)"."""
    if len(values) < 2:
        return "".join(f"{value:.{digits}f}" for value in values)
    low, median, high = np.quantile(values, (0, 0.5, 1))
    return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def against_paper(
    paper: Mapping[str, float], ours: Mapping[str, Sequence[float]]
) -> str:
    """A paper's order of some rows, lowest first, and the pairs that differ here.

    Rows that the paper has equal have no order; here medians over seeds have.
    """
    rows = sorted(ours, key=paper.__getitem__)
    medians = {row: float(np.median(ours[row])) for row in rows}
    wrong = [
        f"{high} is not above {low}"
        for low, high in itertools.combinations(rows, 2)
        # Not <=: NaN has no order.
        if paper[low] < paper[high] and not medians[low] < medians[high]
    ]
    found = "differs here: " + "; ".join(wrong) if wrong else "the same here"
    equal = itertools.groupby(rows, key=paper.__getitem__)
    order = " < ".join(" = ".join(group) for _, group in equal)
    return f"{order} in the paper; {found}"
