"""Masks of leaked targets, and distances of HMT's recall.

HMT's summary of a segment reads its first j tokens before their logits are computed, so
that their losses are no predictions: `drop_leaked_targets` masks them.
He et al. (2025), Hierarchical Memory Transformer, https://arxiv.org/abs/2405.06067.

Shapes: T targets, n segments, B batch, N memory slots.
"""

from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int, Int64

from memjax.checks import require_instance, short
from memjax.evaluation.losses import TokenLosses
from memjax.models.base import Model
from memjax.models.loss import scored_mask


def drop_leaked_targets(model: Model, losses: TokenLosses) -> TokenLosses:
    """Masks targets that their own logits have seen; see `scored_mask`.

    No target is masked unless the model is an HMT with a summary that reads ahead.

    Args:
        model: source of the losses.
        losses: of texts read from an empty memory.
    """
    require_instance("model", model, Model)
    require_instance("losses", losses, TokenLosses)
    first = model.first_scored
    if first == 0:
        return losses
    return mask_losses(losses, scored_mask(losses.mask.shape[1], model.window, first))


def mask_losses(losses: TokenLosses, mask: Float[np.ndarray, "..."]) -> TokenLosses:
    """Losses with all targets outside `mask`, [T] or [R, T], masked."""
    require_instance("losses", losses, TokenLosses)
    require_instance("mask", mask, np.ndarray)
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
    """Distance in segments of the memory that each search weighs most.

    Args:
        scores: weights of the slots in a `SegmentTrace`, newest last, 0 where empty.
        held: memories in the bank; searches of an empty one are left out.
        tokens: tokens read of the segment; segments without any are left out.

    Returns:
        Distances in [1, held], 1 the previous segment, and the memories held.

    Raises:
        ValueError: on other shapes, or `held` out of its range, by name.
    """
    if getattr(scores, "ndim", 0) != 3:
        raise ValueError(f"scores must be an array [n, B, N], got {short(scores)}")
    for name, value in (("held", held), ("tokens", tokens)):
        if getattr(value, "shape", None) != scores.shape[:2]:
            raise ValueError(
                f"{name} must be an array {list(scores.shape[:2])}, got {short(value)}"
            )
    weights, count = np.asarray(scores), np.asarray(held).astype(np.int64)
    slots = weights.shape[-1]
    if count.min(initial=0) < 0 or count.max(initial=0) > slots:
        raise ValueError(f"held must be in [0, {slots}], as many as there are slots")
    # Empty slots never count, even if the weights of all memories underflowed.
    empty = np.arange(slots) < slots - count[..., None]
    best = np.where(empty, -1, weights).argmax(axis=-1)
    # Without memories, or without tokens of the segment, there was no search.
    real = (count > 0) & (np.asarray(tokens) > 0)
    return (slots - best)[real].astype(np.int64), count[real]


def recall_summary(
    distances: Int64[np.ndarray, " R"], held: Int64[np.ndarray, " R"]
) -> dict[str, Any]:
    """Shares of searches by distance, each with its value by chance.

    Returns:
        `previous`: share at distance 1. `within_2`: at 1 or 2. `even`: at an even
        distance, among searches that hold 2 memories or more. `chance_...`: the same
        for a uniform choice of memory. `searches`: their number. NaN without any.

    Raises:
        ValueError: on anything but two arrays of one length, by name.
    """
    for name, value in (("distances", distances), ("held", held)):
        require_instance(name, value, np.ndarray)
    if distances.shape != held.shape or held.ndim != 1:
        raise ValueError(
            f"held must be [R] as distances is, got {held.shape} and {distances.shape}"
        )
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
