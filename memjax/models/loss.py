"""Next-token loss in chunks, so that logits never exist for a whole document.

Target i of a document is its token i + 1; the masks here say which targets count.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Float32, Int, Shaped

from memjax.checks import check_sizes
from memjax_kernels._src.common.partition import elements_a_device, sequence_ways

Head = Callable[[Float[Array, "B C D"]], Float[Array, "B C V"]]
# Floats of a device: 128 MiB of float32.
LOGITS_AT_A_TIME = 2**25
# But no fewer positions of a device: each chunk reads and writes the head's gradient,
# and with 128 positions a quarter of the step of Qwen3.5 0.8B was that.
LEAST_POSITIONS = 512


def target_nll(
    logits: Head,
    features: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    vocab_size: int,
) -> Float[Array, "B T"]:
    """Negative log-likelihood of each target, in nats.

    Positions go through the head in chunks of at most 2**25 logits a device, or of
    512 positions, recomputed in the backward pass. To train, `loss_sum` computes less.
    """
    t, chunk = targets.shape[1], _chunk_size(targets, vocab_size)
    if chunk == t:
        return _losses(logits(features), targets)
    losses = jax.lax.map(
        # Computed again in the backward pass, or all logits would be kept after all.
        jax.checkpoint(lambda chunk: _losses(logits(chunk[0]), chunk[1])),
        _in_chunks(chunk, features, targets),
    )
    return _whole(losses, t)


def loss_sum(
    logits: Head,
    features: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    mask: Float[Array, "B T"],
    vocab_size: int,
) -> Float[Array, ""]:
    """Sum of `target_nll` times the mask, whose gradients come with the losses.

    A chunk's logits give its loss and at once the gradients of features and head, so
    that they are computed once: three products with the head, where computing them
    again takes four, and two where the head is frozen. No gradient of a gradient, nor
    forward mode, where there are several chunks; the mask has no gradient.
    """
    mask = jax.lax.stop_gradient(mask)
    chunk = _chunk_size(targets, vocab_size)
    if chunk == targets.shape[1] // sequence_ways(targets.shape[1]):
        return (_losses(logits(features), targets) * mask).sum()
    # A function with a gradient of its own may not close over what has one.
    head, parameters = jax.closure_convert(logits, features[:, :chunk])
    return _sum_of_chunks(head, chunk, tuple(parameters), features, targets, mask)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sum_of_chunks(head, chunk, parameters, features, targets, mask):
    def add(total, inputs):
        x, targets, mask = inputs
        return total + (_losses(head(x, *parameters), targets) * mask).sum(), None

    inputs = _in_chunks(chunk, features, targets, mask)
    return jax.lax.scan(add, jnp.zeros((), jnp.float32), inputs)[0]


def _sum_and_gradients(head, chunk, parameters, features, targets, mask):
    """The sum; gradients of features and of the parameters that are trained."""
    values = [parameter.value for parameter in parameters]
    trained = [i for i, parameter in enumerate(parameters) if parameter.perturbed]

    def of_chunk(trained_values, x, targets, mask):
        given = list(values)
        for i, value in zip(trained, trained_values, strict=True):
            given[i] = value
        return (_losses(head(x, *given), targets) * mask).sum()

    def add(carry, inputs):
        total, gradients = carry
        found = jax.value_and_grad(of_chunk, (0, 1))(first, *inputs)
        loss, (of_values, of_features) = found
        gradients = jax.tree.map(jnp.add, gradients, of_values)
        return (total + loss, gradients), of_features

    first = [values[i] for i in trained]
    start = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, first)
    inputs = _in_chunks(chunk, *(x.value for x in (features, targets, mask)))
    (total, found), of_features = jax.lax.scan(add, start, inputs)
    gradients: list[Array | None] = [None] * len(values)
    for i, gradient in zip(trained, found, strict=True):
        gradients[i] = gradient
    return total, (tuple(gradients), _whole(of_features, targets.value.shape[1]))


def _scaled_gradients(head, chunk, gradients, cotangent):
    def scaled(x):
        return (x * cotangent).astype(x.dtype)

    # Neither targets nor mask have one.
    return (*jax.tree.map(scaled, gradients), None, None)


_sum_of_chunks.defvjp(_sum_and_gradients, _scaled_gradients, symbolic_zeros=True)


def _losses(
    logits: Float[Array, "B C V"], targets: Int[Array, "B C"]
) -> Float[Array, "B C"]:
    """Negative log-likelihoods; NaN for a target that is not below V."""
    gathered = optax.softmax_cross_entropy_with_integer_labels
    return jax.lax.platform_dependent(
        logits, targets, tpu=_compared_losses, default=gathered
    )


def _compared_losses(logits, targets):
    """Reads the targets' logits by comparing all tokens with them.

    The gradient of the comparison is one too, which XLA fuses into the products that
    take the logits' gradient. A gather's is a scatter: on a TPU that needs an array of
    all logits of its own where the batch is one sequence. On a CPU it is faster.
    """
    tokens = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    chosen = jnp.where(tokens == targets[..., None], logits, 0).sum(axis=-1)
    known = (targets >= 0) & (targets < logits.shape[-1])
    return jax.nn.logsumexp(logits, axis=-1) - jnp.where(known, chosen, jnp.nan)


def _chunk_size(targets: Int[Array, "B T"], vocab_size: int) -> int:
    """Number of positions with logits in memory at once."""
    t = targets.shape[1]
    # On a mesh each chunk sums its head's gradient over all devices: few chunks.
    b = elements_a_device(targets.shape[0])
    t //= sequence_ways(t)
    # Logits are V / D times as large as features: those of all positions may not fit.
    positions = max(LEAST_POSITIONS, LOGITS_AT_A_TIME // vocab_size)
    most = max(1, min(t, positions // b))
    # One that divides T, if a large one does: padding is computed, too.
    even = (size for size in range(most, most // 2, -1) if t % size == 0)
    return next(even, most)


def _in_chunks(chunk: int, *arrays: Shaped[Array, "B T ..."]) -> tuple[Array, ...]:
    """Each as [n, B, chunk, ...], zeros at the end: a scan needs chunks of one size.

    Where sequences are divided among devices, each chunk has a share of every device.
    """

    def split(x):
        ways = sequence_ways(x.shape[1])
        x = x.reshape(x.shape[0], ways, -1, *x.shape[2:])
        end = -x.shape[2] % chunk
        x = jnp.pad(x, ((0, 0), (0, 0), (0, end)) + ((0, 0),) * (x.ndim - 3))
        x = jnp.moveaxis(x.reshape(*x.shape[:2], -1, chunk, *x.shape[3:]), 2, 0)
        return x.reshape(*x.shape[:2], -1, *x.shape[4:])

    return tuple(map(split, arrays))


def _whole(chunks: Shaped[Array, "n B C ..."], length: int) -> Array:
    """[B, T, ...] again, without the padding."""
    n, b, size, *rest = chunks.shape
    ways = sequence_ways(length)
    x = jnp.moveaxis(chunks.reshape(n, b, ways, size // ways, *rest), 0, 2)
    return x.reshape(b, ways, -1, *rest)[:, :, : length // ways].reshape(
        b, length, *rest
    )


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


def scored_mask(length: int, segment: int, first: int) -> Float32[np.ndarray, " T"]:
    """1 where a target is at `first` or later in its segment, else 0.

    Target i lies in segment (i + 1) // L.

    Args:
        length: T, targets of a text that starts with a segment.
        segment: L, tokens of a segment.
        first: tokens at the start of every segment that do not count, in [0, L].

    Raises:
        ValueError: if a size is out of range.
    """
    check_sizes(least=0, length=length, first=first)
    check_sizes(segment=segment)
    if not 0 <= first <= segment:
        raise ValueError(f"first must be in [0, {segment}], got {first}")
    # Target i is token i + 1: that token's position in its segment decides.
    position = (np.arange(length) + 1) % segment
    return (position >= first).astype(np.float32)
