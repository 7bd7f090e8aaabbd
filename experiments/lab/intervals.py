"""Gains in result files: nats saved a token, with an interval by document."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from memjax.evaluation import TokenLosses
from memjax.evaluation.statistics import (
    MIN_DOCUMENTS,
    loss_difference_by_document,
    mean_loss_difference,
)


def gain(base: TokenLosses, model: TokenLosses) -> dict[str, Any]:
    """What `model` saves over `base`, as JSON has it.

    Returns:
        `nats`, `perplexity_change`, `documents`; `low`, `high` and `standard_error`,
        which are None where there are too few documents of a kind to say.
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
        found |= {"nats": nats, "low": None, "high": None, "standard_error": None}
    else:
        found |= loss_difference_by_document(base, model)._asdict()
        nats = found["nats"]
    return found | {"perplexity_change": math.expm1(-nats)}


def shown(found: Mapping[str, Any], digits: int = 3) -> str:
    """A gain as text: "0.032 [0.011, 0.054]"."""
    if found["low"] is None:
        return f"{found['nats']:+.{digits}f} (too few documents)"
    low, high = (f"{found[name]:+.{digits}f}" for name in ("low", "high"))
    return f"{found['nats']:+.{digits}f} [{low}, {high}]"


def by_seed(nats: Sequence[float]) -> str:
    """What is saved with each seed, as text: "+0.024, +0.025"."""
    return ", ".join(f"{x:+.3f}" for x in nats)


def mean_losses(losses: Sequence[TokenLosses]) -> TokenLosses:
    """Of the same targets, by models of several seeds."""
    return losses[0]._replace(nll=np.mean([x.nll for x in losses], axis=0))


def restrict_kind(losses: TokenLosses, kind: str | None) -> TokenLosses:
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
