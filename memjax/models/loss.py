"""Next-token loss in chunks, so that logits never exist for a whole document.

Target i of a document is its token i + 1; the masks here say which targets count.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Float32, Int

# Floats: 128 MiB of float32.
LOGITS_AT_A_TIME = 2**25


def token_losses(
    logits: Callable[[Float[Array, "B C D"]], Float[Array, "B C V"]],
    features: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    vocab_size: int,
) -> Float[Array, "B T"]:
    """Negative log-likelihood of each target, in nats.

    Positions go through the head in chunks of at most 2**25 logits, recomputed in the
    backward pass.

    Args:
        logits: the head.
        features: what it takes.
        targets: in [0, V).
        vocab_size: V.
    """
    b, t, d = features.shape
    # Logits are V / D times as large as features: those of all positions may not fit.
    most = max(1, min(t, LOGITS_AT_A_TIME // (b * vocab_size)))
    # One that divides T, if a large one does: padding is computed, too.
    even = (size for size in range(most, most // 2, -1) if t % size == 0)
    chunk = next(even, most)
    loss = optax.softmax_cross_entropy_with_integer_labels
    if chunk == t:
        return loss(logits(features), targets)
    # The scan needs chunks of one size; losses of the padding are cut off below.
    pad = -t % chunk
    features = jnp.pad(features, ((0, 0), (0, pad), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, pad)))
    chunks = (
        jnp.moveaxis(features.reshape(b, -1, chunk, d), 1, 0),
        jnp.moveaxis(targets.reshape(b, -1, chunk), 1, 0),
    )
    losses = jax.lax.map(
        # Computed again in the backward pass, or all logits would be kept after all.
        jax.checkpoint(lambda chunk: loss(logits(chunk[0]), chunk[1])),
        chunks,
    )
    return jnp.moveaxis(losses, 0, 1).reshape(b, -1)[:, :t]


def last_targets(mask: Float[Array, "B T"], count: int) -> Float[Array, "B T"]:
    """The mask with the last `count` of the targets that count, in each sequence."""
    from_the_end = jnp.cumsum((mask > 0)[:, ::-1], axis=1)[:, ::-1]
    return jnp.where(from_the_end <= count, mask, 0.0)


def last_positions(mask: Float[Array, "B T"], count: int) -> Int[Array, "B n"]:
    """Indices of the last `count` targets that count in each sequence, in order.

    n is `count`, or T if that is less. Where a sequence has fewer such targets, others
    whose mask is 0 come first.
    """
    count = min(count, mask.shape[1])
    # Stable, so that the targets that count stay in order, at the end.
    return jnp.argsort(mask > 0, axis=1, stable=True)[:, mask.shape[1] - count :]


def scored(length: int, segment: int, first: int) -> Float32[np.ndarray, " T"]:
    """1 where a target lies at `first` or later in its segment, else 0.

    Target i lies in segment (i + 1) // L.

    Args:
        length: T, targets of a text that starts with a segment.
        segment: L, tokens of a segment.
        first: tokens at the start of every segment that do not count, in [0, L].

    Raises:
        ValueError: if a size is out of range.
    """
    if length < 0 or segment < 1:
        raise ValueError(
            f"length must be at least 0 and segment at least 1, "
            f"got length={length}, segment={segment}"
        )
    if not 0 <= first <= segment:
        raise ValueError(f"first must be in [0, {segment}], got {first}")
    # Target i is token i + 1: that token's position in its segment decides.
    position = (np.arange(length) + 1) % segment
    return (position >= first).astype(np.float32)
