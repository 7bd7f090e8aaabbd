"""Targets that a model has seen before it predicts them, and how far HMT recalls.

He et al. (2025), Hierarchical Memory Transformer, https://arxiv.org/abs/2405.06067.
HMT's summary of a segment reads its first j tokens before their logits are computed:
a score of them would not be a prediction. `drop_leaked_targets` leaves them out.

Shapes: T targets, n segments, B batch, N memory slots.
"""

from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int, Int64

from memjax.evaluation.losses import TokenLosses
from memjax.models.base import Model
from memjax.models.loss import scored_mask


def drop_leaked_targets(model: Model, losses: TokenLosses) -> TokenLosses:
    """The losses without targets that their own logits have seen; see `scored_mask`.

    All of them, unless the model is an HMT whose summary reads ahead.

    Args:
        model: that gave the losses.
        losses: of texts read from an empty memory.
    """
    first = model.first_scored
    if first == 0:
        return losses
    return mask_losses(losses, scored_mask(losses.mask.shape[1], model.window, first))


def mask_losses(losses: TokenLosses, mask: Float[np.ndarray, "..."]) -> TokenLosses:
    """Losses of which only the targets in `mask`, [T] or [R, T], count."""
    if mask.shape not in (losses.mask.shape, losses.mask.shape[1:]):
        raise ValueError(
            f"mask must be {losses.mask.shape[1:]} or {losses.mask.shape}, "
            f"got {mask.shape}"
        )
    mask = (losses.mask * np.broadcast_to(mask, losses.mask.shape)).astype(np.float32)
    return losses._replace(nll=np.where(mask > 0, losses.nll, 0), mask=mask)


def recall_distances(
    scores: Float[Array, "n B N"] | Float[np.ndarray, "n B N"],
    held: Int[Array, "n B"] | Int[np.ndarray, "n B"],
    tokens: Int[Array, "n B"] | Int[np.ndarray, "n B"],
) -> tuple[Int64[np.ndarray, " R"], Int64[np.ndarray, " R"]]:
    """How many segments back the memory lies that each search weighs most.

    Args:
        scores: of a `SegmentTrace`: weights of the slots, newest last, 0 where empty.
        held: of it: memories that could be found; where there is none is left out.
        tokens: of it: what is read of the segment; where that is none is left out.

    Returns:
        Distances in [1, held], 1 the previous segment, and the memories held.
    """
    weights, count = np.asarray(scores), np.asarray(held).astype(np.int64)
    slots = weights.shape[-1]
    if count.min(initial=0) < 0 or count.max(initial=0) > slots:
        raise ValueError(f"held must be in [0, {slots}], as many as there are slots")
    # An empty slot is no memory, also where all weights that are held underflowed.
    empty = np.arange(slots) < slots - count[..., None]
    best = np.where(empty, -1, weights).argmax(axis=-1)
    # A search among no memories, or for a segment that was not read, is none.
    real = (count > 0) & (np.asarray(tokens) > 0)
    return (slots - best)[real].astype(np.int64), count[real]


def recall_summary(
    distances: Int64[np.ndarray, " R"], held: Int64[np.ndarray, " R"]
) -> dict[str, Any]:
    """Shares of the searches that go back so far; what chance would give, beside.

    Returns:
        `previous`: share at distance 1. `within_2`: at 1 or 2. `even`: at an even
        distance, among searches that hold 2 memories or more. `chance_...`: the same
        for searches that pick any memory alike. `searches`: how many. NaN for none.
    """
    many = held >= 2

    def mean(x):
        return float(np.mean(x)) if len(x) else float("nan")

    return {
        "searches": len(distances),
        "previous": mean(distances == 1),
        "chance_previous": mean(1 / held),
        "within_2": mean(distances <= 2),
        "chance_within_2": mean(np.minimum(2, held) / held),
        "even": mean(distances[many] % 2 == 0),
        "chance_even": mean(held[many] // 2 / held[many]),
    }
