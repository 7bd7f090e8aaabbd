"""Attention of many tokens to windows, in blocks.

A block of Q queries sees no other keys than the W before it and its own Q.

Shapes: B batch, T time, H query heads, G key-value heads, K head width, W window, n
blocks, S keys of a block.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from memjax.mechanisms.layers import projections
from memjax.mechanisms.layers.heads import HeadsConfig
from memjax.mechanisms.layers.softmax import dot_product_attention as attend

# Keys without RoPE, values, and which of them are visible.
Past = tuple[Float[Array, "B W G K"], Float[Array, "B W G K"], Bool[Array, "B W"]]


def in_blocks(
    config: HeadsConfig,
    window: int,
    past: Past,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    visible: Bool[Array, "B T"],
    first: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """Outputs and masses of the new tokens, which see each other and the W before.

    Args:
        config: RoPE of the heads.
        window: W.
        past: of the W tokens before, the oldest first.
        q: queries without RoPE, as keys.
        k: keys.
        v: values.
        visible: False at tokens that no query sees.
        first: a query sees no key before its own `first`, where its document begins;
            None is the oldest of the past.
    """
    b, t = q.shape[:2]
    # Blocks as long as the window: each query scores at most 2 W keys.
    size = min(window, t)

    def join(old, new):
        return jnp.concatenate([old.astype(new.dtype), new], axis=1)

    stream = [join(*pair) for pair in zip(past, (k, v, visible), strict=True)]
    queries = _pad(q, -t % size).reshape(b, -1, size, *q.shape[2:])
    keys, values, visible = (
        _around(_pad(leaf, -t % size), window, size) for leaf in stream
    )
    seen = _band(window, size)[None, None] & visible[:, :, None]
    if first is not None:
        seen &= _since(first, window, size)
    # Positions count from the start of a block's window.
    positions = jnp.arange(seen.shape[-1], dtype=jnp.int32)
    y, mass = attend.blocks_with_mass(
        projections.apply_rope(config, queries, positions[-size:]),
        projections.apply_rope(config, keys, positions),
        values,
        seen,
    )

    def by_tokens(x):
        return x.reshape(b, -1, *x.shape[3:])[:, :t]

    return by_tokens(y), by_tokens(mass)


def _pad(x: Array, more: int) -> Array:
    """Zeros behind the tokens [B, T, ...]."""
    return jnp.pad(x, ((0, 0), (0, more)) + ((0, 0),) * (x.ndim - 2))


def _around(stream: Array, window: int, size: int) -> Array:
    """The block's own tokens behind the W before them: [B, n, W + Q, ...]."""
    # The W tokens before a block and the block itself hold every key that its queries
    # see.
    blocks = (stream.shape[1] - window) // size
    if blocks == 1:
        # All of it, which need not be gathered.
        return stream[:, None]
    first = jnp.arange(blocks, dtype=jnp.int32)[:, None] * size
    return stream[:, first + jnp.arange(window + size, dtype=jnp.int32)[None]]


def _band(window: int, size: int) -> Bool[Array, "Q S"]:
    """Whether query i of a block may see key s: inside its window and not after it."""
    s = jnp.arange(window + size, dtype=jnp.int32)[None]
    i = jnp.arange(size, dtype=jnp.int32)[:, None]
    return (s > i) & (s <= window + i)


def _since(first: Int[Array, "B T"], window: int, size: int) -> Bool[Array, "B n Q S"]:
    """Whether query i of a block sees key s as far as its document goes."""
    first = _pad(first, -first.shape[1] % size).reshape(first.shape[0], -1, size)
    blocks = jnp.arange(first.shape[1], dtype=jnp.int32)[:, None] * size - window
    places = blocks + jnp.arange(window + size, dtype=jnp.int32)[None]
    return places[None, :, None] >= first[..., None]
