"""Splits a segment into chunks, at each batch element's own position in its chunk.

Where the memory of a batch element is `position` tokens into a chunk, its first token
goes there. So a sequence has the same chunks however it is split into segments.
Positions before the first token and after the last hold zeros: an op must treat a token
of zeros, rates and log gates included, as no token.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from memjax_kernels._src.common.varying import vary_alike


# Any: jax also builds this class around shapes, blocks and references.
class Chunks(NamedTuple):
    """Tokens of a segment, cut into n chunks of C.

    Attributes:
        tokens: q, k, v and further ones, each [B, n, C, H, D]; of q and k, heads may be
            fewer: value head h reads key head h // ways.
        gates: each [B, n, C, H] or [B, n, C, H, passes]; None for none.
        full: Bool[B, n], whether tokens reach the end of each chunk; None is always.
        reset: Bool[B, n], whether the chunk starts from `empty`; None is never.
    """

    tokens: Any
    gates: tuple[Any, ...]
    full: Any
    reset: Any


def float_flags(x: Chunks) -> Chunks:
    """Flags as float32, so that everything has a gradient."""
    full, reset = jax.tree.map(lambda flag: flag.astype(jnp.float32), x[2:])
    return x._replace(full=full, reset=reset)


def bool_flags(x: Chunks) -> Chunks:
    """Undoes `float_flags`."""
    full, reset = jax.tree.map(lambda flag: flag > 0.5, x[2:])
    return x._replace(full=full, reset=reset)


def count_full(x: Chunks) -> Int[Array, " B"]:
    """Chunks that the tokens of a batch element fill: the first ones."""
    if x.full is None:
        return jnp.full(x.tokens[0].shape[0], x.tokens[0].shape[1], jnp.int32)
    return jnp.sum(x.full, axis=1, dtype=jnp.int32)


def count_chunks(time: int, size: int, aligned: bool) -> int:
    """Chunks that hold T tokens from any position in a chunk, or from its start."""
    return -(-(time if aligned else time + size - 1) // size)


def split(
    x: Shaped[Array, "B T *X"], size: int, position: Int[Array, " B"] | None
) -> Shaped[Array, "B n C *X"]:
    """Splits [B, T, ...] into [B, n, C, ...], with zeros around it.

    `position` has the tokens of each chunk that came before, in [0, C). None says that
    all start a chunk, which saves the shift.
    """
    # Position 0 for all needs a chunk less than positions that are not known.
    chunks = count_chunks(x.shape[1], size, position is None)
    tail = chunks * size - x.shape[1]
    padded = jnp.pad(x, [(0, 0), (0, tail)] + [(0, 0)] * (x.ndim - 2))
    if position is not None:
        # The rolled-in end is padding: position < C, and tail >= C - 1.
        padded = _rolled(padded, position)
    return padded.reshape(x.shape[0], chunks, size, *x.shape[2:])


def join(
    chunks: Shaped[Array, "B n C *X"], time: int, position: Int[Array, " B"] | None
) -> Shaped[Array, "B T *X"]:
    """The T tokens that `split` put into chunks."""
    flat = chunks.reshape(chunks.shape[0], -1, *chunks.shape[3:])
    return (flat if position is None else _rolled(flat, -position))[:, :time]


def _rolled(
    x: Shaped[Array, "B T *X"], by: Int[Array, " B"]
) -> Shaped[Array, "B T *X"]:
    """The tokens of each batch element, rolled along T by its number of `by`."""
    roll = jax.vmap(lambda element, by: jnp.roll(element, by, axis=0))
    # Usually all begin a chunk: a roll would copy every token for nothing.
    return jax.lax.cond(jnp.any(by != 0), lambda x: roll(x, by), lambda x: x, x)


def completed(
    chunks: int, size: int, time: int, position: Int[Array, " B"] | None, batch: int
) -> Bool[Array, "B n"]:
    """Whether the tokens of a batch element reach the end of each chunk."""
    end_of_tokens = jnp.full(batch, time) if position is None else position + time
    ends = (jnp.arange(chunks, dtype=jnp.int32) + 1) * size
    return ends[None] <= end_of_tokens[:, None]


def scan(
    step: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    carry: PyTree,
    xs: PyTree,
    *,
    remat_every: int = 1,
) -> tuple[PyTree, PyTree]:
    """`lax.scan` with the carry of every n-th step as residuals.

    Args:
        step: (carry, x) -> (carry, y).
        carry: the state before the first.
        xs: [n, ...] leaves.
        remat_every: steps between two saved carries, at least 1. The backward pass
            computes the steps between them again: a larger number saves fewer carries
            and needs more memory at once.
    """
    # Inside a shard_map a carry must vary over the axes that its later values do.
    carry, xs = vary_alike((carry, xs))
    length = jax.tree.leaves(xs)[0].shape[0]
    whole = length - length % remat_every

    def inner(carry, xs):
        return jax.lax.scan(step, carry, xs)

    if not whole:  # A scan of no group would still be compiled.
        return inner(carry, xs)
    carry, ys = jax.lax.scan(
        # Inside a scan the second run cannot be merged with the first, so that it needs
        # no guard.
        jax.checkpoint(inner, prevent_cse=False),
        carry,
        jax.tree.map(lambda x: x[:whole].reshape(-1, remat_every, *x.shape[1:]), xs),
    )
    ys = jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), ys)
    if whole == length:
        return carry, ys
    carry, rest = inner(carry, jax.tree.map(lambda x: x[whole:], xs))
    return carry, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), ys, rest)


def decay(log_gates: Float[Array, "*B C"]) -> Float[Array, "*B C C"]:
    """exp of the sum of gates j+1..i for i >= j, zero above: masks before exp.

    Each sum is over its own gates: a difference of cumulative sums would lose the
    gates after a strong one. Gates may be -inf.
    """
    size = log_gates.shape[-1]
    seen = jnp.tril(jnp.ones((size, size), bool))
    later = jnp.tril(jnp.ones((size, size), log_gates.dtype), -1)

    def like_gates(x):
        return x.reshape((1,) * (log_gates.ndim - 1) + x.shape)

    # exp is zero from -104 on, and finite terms keep the products with 0 finite.
    terms = jnp.maximum(log_gates, -1e4)[..., :, None] * like_gates(later)
    sums = jnp.einsum(
        "il,...lj->...ij",
        seen.astype(terms.dtype),
        terms,
        precision=jax.lax.Precision.HIGHEST,
    )
    return jnp.where(like_gates(seen), jnp.exp(sums), 0.0)


def misplaced_resets(
    reset: Bool[Array, "B T"] | None, size: int, position: Int[Array, " B"] | None
) -> Bool[Array, "B T"] | None:
    """True from the first reset of a batch element on that starts no chunk.

    None where there can be none. Results from there on are not defined. Its reads must
    be NaN, and so must the batch element's state.

    Raises:
        ValueError: where such a reset is known, outside jit.
    """
    # Every token starts a chunk of one.
    if reset is None or size == 1:
        return None
    time = jnp.arange(reset.shape[1], dtype=jnp.int32)[None]
    offset = time if position is None else position[:, None] + time
    wrong = reset & (offset % size != 0)
    if not isinstance(wrong, Tracer) and wrong.any():
        element, token = (int(index[0]) for index in jnp.nonzero(wrong))
        raise ValueError(
            f"reset must be where a chunk of {size} starts, got one in batch element "
            f"{element} before token {token}, "
            f"{offset[element % len(offset), token] % size} into it"
        )
    # Every token after it reads a memory that is not defined.
    return jnp.cumsum(wrong, axis=1, dtype=jnp.int32) > 0


def mask_with_nan(
    state: PyTree, y: Float[Array, "B T H V"], wrong: Bool[Array, "B T"] | None
) -> tuple[PyTree, Float[Array, "B T H V"]]:
    """NaN for the reads after a misplaced reset, and in those batch elements' state."""
    if wrong is None:
        return state, y

    def masked(leaf):
        # Positions count tokens, whatever became of the memory.
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return where(wrong[:, -1], jnp.nan, leaf)

    return jax.tree.map(masked, state), jnp.where(wrong[..., None, None], jnp.nan, y)


def where(rows: Bool[Array, " B"], new: Array | float, old: Array) -> Array:
    """`new` in the batch elements `rows`, `old` in the others."""
    return jnp.where(rows.reshape(-1, *[1] * (old.ndim - 1)), new, old)


def replace(rows: Bool[Array, " B"], new: PyTree, old: PyTree) -> PyTree:
    """`where` of every leaf."""
    return jax.tree.map(lambda a, b: where(rows, a, b), new, old)
