"""Next-token loss in pieces, so that logits never exist for a whole document."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

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
