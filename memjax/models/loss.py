"""Next-token loss in pieces, so that logits never exist for a whole document.

Which targets count: target i of a text is its token i + 1.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Float32, Int

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
    """
    b, t, d = features.shape
    chunk = max(1, min(t, LOGITS_AT_A_TIME // (b * vocab_size)))
    loss = optax.softmax_cross_entropy_with_integer_labels
    if chunk == t:
        return loss(logits(features), targets)
    pad = -t % chunk
    features = jnp.pad(features, ((0, 0), (0, pad), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, pad)))
    pieces = (
        jnp.moveaxis(features.reshape(b, -1, chunk, d), 1, 0),
        jnp.moveaxis(targets.reshape(b, -1, chunk), 1, 0),
    )
    losses = jax.lax.map(
        jax.checkpoint(lambda piece: loss(logits(piece[0]), piece[1])), pieces
    )
    return jnp.moveaxis(losses, 0, 1).reshape(b, -1)[:, :t]


def last_targets(mask: Float[Array, "B T"], count: int) -> Float[Array, "B T"]:
    """The mask with the last `count` of the targets it lets through, row by row."""
    from_the_end = jnp.cumsum((mask > 0)[:, ::-1], axis=1)[:, ::-1]
    return jnp.where(from_the_end <= count, mask, 0.0)


def last_places(mask: Float[Array, "B T"], count: int) -> Int[Array, "B n"]:
    """Indices of each row's last `count` targets that the mask lets through, in order.

    n is `count`, or T if that is less. In a row with fewer such targets others come
    first, whose mask is 0.
    """
    count = min(count, mask.shape[1])
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
    place = (np.arange(length) + 1) % segment
    return (place >= first).astype(np.float32)
