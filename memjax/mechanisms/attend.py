"""Library attention over blocks, with memory bounded in the length.

Softmax attention itself is `jax.nn.dot_product_attention`; this file only chooses
what to hand it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Scores of one attention call, in elements: 2**26 float32 are 256 MiB.
MAX_SCORES = 2**26


def causal(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G K"],
    visible: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B T H K"]:
    """Every query sees the keys up to its own position, those that are visible.

    Half precision on a GPU takes cuDNN's flash attention where all are; elsewhere
    queries go through in blocks, so that scores never need T * T memory at once.
    """
    half = query.dtype in (jnp.bfloat16, jnp.float16) and visible is None
    if jax.default_backend() == "gpu" and half and query.shape[-1] <= 128:
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation="cudnn"
        )
    before = jnp.zeros(query.shape[0], jnp.int32)
    return from_cache(query, key, value, before, visible)


def from_cache(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B S G K"],
    value: Float[Array, "B S G K"],
    before: Int[Array, " B"],
    visible: Bool[Array, "B S"] | None = None,
) -> Float[Array, "B T H K"]:
    """Query t of a row sees the keys 0 to before + t, those that are visible."""
    b, t, h, _ = query.shape
    s = key.shape[1]
    rows = max(1, min(t, MAX_SCORES // (b * h * s)))
    positions = before[:, None] + jnp.arange(t, dtype=jnp.int32)[None]

    def some_queries(query, positions):
        mask = jnp.arange(s, dtype=jnp.int32)[None, None] <= positions[..., None]
        if visible is not None:
            mask &= visible[:, None]
        return jax.nn.dot_product_attention(query, key, value, mask=mask[:, None])

    if rows == t:
        return some_queries(query, positions)
    pad = -t % rows
    query = jnp.pad(query, ((0, 0), (0, pad), (0, 0), (0, 0)))
    positions = jnp.pad(positions, ((0, 0), (0, pad)))
    split = lambda x: jnp.moveaxis(x.reshape(b, -1, rows, *x.shape[2:]), 1, 0)
    y = jax.lax.map(
        jax.checkpoint(lambda xs: some_queries(*xs)), (split(query), split(positions))
    )
    return jnp.moveaxis(y, 0, 1).reshape(b, t + pad, *y.shape[3:])[:, :t]


def blocks(
    query: Float[Array, "B n Q H K"],
    key: Float[Array, "B n S G K"],
    value: Float[Array, "B n S G K"],
    mask: Bool[Array, "B n Q S"],
) -> Float[Array, "B n Q H K"]:
    """Attention inside each block; as many blocks at a time as scores allow."""
    b, n, q, h, _ = query.shape
    s = key.shape[2]
    together = max(1, MAX_SCORES // (b * h * q * s))

    def attend(block):
        query, key, value, mask = block
        return jax.nn.dot_product_attention(query, key, value, mask=mask[:, None])

    if n <= together:
        merged = jax.tree.map(
            lambda x: x.reshape(b * n, *x.shape[2:]), (query, key, value, mask)
        )
        return attend(merged).reshape(query.shape)
    block_first = jax.tree.map(
        lambda x: jnp.moveaxis(x, 1, 0), (query, key, value, mask)
    )
    return jnp.moveaxis(jax.lax.map(jax.checkpoint(attend), block_first), 0, 1)
