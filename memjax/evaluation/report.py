"""The scores of `memjax eval` as JSON."""

import math

import numpy as np

from memjax.evaluation.losses import TokenLosses, perplexity

#: Scores by name, None where there is no such target.
Scores = dict[str, float | None]


def perplexities(
    losses: TokenLosses,
    every: TokenLosses,
    window: int,
    key: TokenLosses | None = None,
) -> dict[str, Scores]:
    """Perplexities of all texts, as "all", and of each kind.

    Args:
        losses: of the targets that count.
        every: of all targets.
        window: of the model, in tokens; "beyond_window" is of targets from there on.
        key: of the key tokens alone; None has no LongPPL.

    Returns:
        "perplexity", "beyond_window", "all_targets" where some do not count, and
        "long_ppl".
    """
    leaks = not np.array_equal(losses.mask, every.mask)
    return {
        kind or "all": {
            "perplexity": or_none(perplexity(losses, kind=kind)),
            "beyond_window": or_none(perplexity(losses, kind=kind, first=window)),
        }
        | ({"all_targets": or_none(perplexity(every, kind=kind))} if leaks else {})
        | ({"long_ppl": or_none(perplexity(key, kind=kind))} if key else {})
        for kind in (None, *dict.fromkeys(losses.kinds))
    }


def columns(rows: dict[str, Scores]) -> list[str]:
    """The names of the scores that some row has."""
    return [name for name in rows["all"] if any(row[name] for row in rows.values())]


def or_none(value: float) -> float | None:
    """The value; None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None
