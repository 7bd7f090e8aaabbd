"""Linear recurrences S ← diag(exp(g)) S + k vᵀ in chunks of matrix products.

A segment is split into groups of chunks. The products of all chunks of a group are
computed together, and only the memories in sequence. The residuals are the memories
before groups, linear in T; the backward pass computes the rest again.

Dao and Gu (2024), https://arxiv.org/abs/2405.21060, section 6, for one gate a head;
Yang et al. (2023), https://arxiv.org/abs/2312.06635, section 4, for one a channel.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from memjax_kernels._src.common import chunks, decays
from memjax_kernels._src.common.products import Multiply, multiplier, operand_dtype

# Chunks of a group: more chunks are larger products, and more memory at once.
GROUP = 8
# Larger chunks are fewer memories, but their matrices grow with the square.
CHUNK_SIZE = 64


def channel_chunk_size() -> int:
    """Tokens of a chunk with a gate of each channel, whose decays have a channel axis.

    On a CPU 16 take a tenth to a half less time than 32, and compile in a third less.
    """
    return 16 if jax.default_backend() == "cpu" else 32


def scan_groups(
    advance_group: Callable[..., tuple[PyTree, Array]],
    tokens: tuple[Float[Array, "B T ..."] | None, ...],
    state: PyTree[Float[Array, "B ..."]],
    reset: Bool[Array, "B T"] | None,
    chunk_size: int,
) -> tuple[PyTree[Float[Array, "B ..."]], Float[Array, "B T ..."]]:
    """Scans over groups of n chunks.

    Args:
        advance_group: (state, *tokens, reset) -> (state, y) of a group, where tokens
            and y are [n, B, H, C, D] and reset is [n, B, C].
        tokens: [B, T, H, D] or None; a token of zeros must be no token.
        state: the memory before the first.
        reset: True empties the memory before that token.
        chunk_size: C at most, a power of two; it does not change what is computed.
    """
    time = next(x for x in tokens if x is not None).shape[1]
    # A short segment takes the smallest power of two that holds it.
    size = min(chunk_size, 1 << (time - 1).bit_length())
    # Groups of equal size, for the fewest chunks of padding.
    count = -(-time // size)
    group = -(-count // -(-count // GROUP))

    def grouped(x):
        x = chunks.split(x, group * size, None)
        x = x.reshape(*x.shape[:2], group, size, *x.shape[3:])
        x = jnp.moveaxis(x, 0, 2)
        return x if x.ndim == 4 else jnp.moveaxis(x, 4, 3)

    items = jax.tree.map(grouped, (*tokens, reset))
    state, y = chunks.scan(
        lambda state, item: advance_group(state, *item), state, items
    )
    y = jnp.moveaxis(jnp.moveaxis(y, 3, 4), 2, 0)
    return state, y.reshape(y.shape[0], -1, *y.shape[4:])[:, :time]


def linear_group(
    state: Float[Array, "B H K V"],
    q: Float[Array, "n B H C K"],
    k: Float[Array, "n B H C K"],
    v: Float[Array, "n B H C V"],
    g: Float[Array, "n B H C G"] | None,
    reset: Bool[Array, "n B C"] | None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "n B H C V"]]:
    """A group of S ← diag(exp(g)) S + k vᵀ, y = Sᵀq; G is 1 or K."""
    left = decays.decays(g, reset, q.shape[-2])
    multiply = multiplier(operand_dtype(q, k, v))
    q, k, value = (x.astype(jnp.float32) for x in (q, k, v))
    state, y = linear_reads(state, q, k, value, left, multiply)
    return state, y.astype(v.dtype)


def ungated(group: Callable[..., tuple[PyTree, Array]]) -> Callable[..., Any]:
    """A group's chunk form for an op without log gates."""

    def advance(state, *given):
        *tokens, reset = given
        return group(state, *tokens, None, reset)

    return advance


def linear_reads(
    state: Float[Array, "B H K V"],
    q: Float[Array, "n B H C K"],
    k: Float[Array, "n B H C K"],
    v: Float[Array, "n B H C V"],
    left: decays.Decays,
    multiply: Multiply,
) -> tuple[Float[Array, "B H K V"], Float[Array, "n B H C V"]]:
    """`linear_group` from the decays of the gates."""
    # A decay of the whole head scales reads and values, not q and k: value heads may
    # share those.
    shared = left.matrix is not None
    on_keys = (lambda x, decay: x) if shared else jnp.multiply
    on_values = jnp.multiply if shared else (lambda x, decay: x)
    # All chunks at once; only adding them to the memory has to go in order.
    written = multiply(on_keys(k, left.until), on_values(v, left.until), "tn")
    state, starts = carry(state, left.since[..., -1, :], written)
    (inside,) = decays.scores((q,), k, left, multiply)
    read = multiply(on_keys(q, left.since), starts, "nn")
    return state, multiply(inside, v, "nn") + on_values(read, left.since)


def carry(
    state: Float[Array, "B H K V"],
    decay: Float[Array, "#n #B #H #K"],
    written: Float[Array, "n B H K V"],
) -> tuple[Float[Array, "B H K V"], Float[Array, "n B H K V"]]:
    """The memory after the group, and before each of its chunks."""
    # Without gates there is one decay of 1 for all chunks, and a scan needs one for
    # each.
    decay = jnp.broadcast_to(decay, (written.shape[0], *decay.shape[1:]))

    def move(state, item):
        decay, written = item
        return decay[..., None] * state + written, state

    return jax.lax.scan(move, state, (decay, written))
