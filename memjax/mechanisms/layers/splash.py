"""Causal attention of whole sequences on a TPU: jax's splash kernel.

It keeps no scores, and passes over blocks that no query of a block sees. `unsupported`
says what it does not take.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
)
from jaxtyping import Array, Float

from memjax_kernels.common.partition import chunkwise

# Queries and keys of a block, at most: the fastest of 256 to 1,024, counted.
BLOCK = 512
# The kernel's blocks are whole registers along the tokens.
LANES = 128


def unsupported(query: Array, key: Array, window: int | None = None) -> str:
    """Why the kernel does not take these tokens, "" where it does.

    Args:
        query: [B, T, H, K].
        key: [B, S, G, K].
        window: keys that a query sees, itself included; None is all before it.
    """
    time, width = query.shape[1], query.shape[-1]
    if query.dtype != jnp.bfloat16:
        return f"tokens are {query.dtype}, not bfloat16"
    if key.shape[1] != time or time % LANES:
        return f"queries must be those of all {key.shape[1]} keys, a multiple of 128"
    if width % 64:
        return f"heads are {width} wide, no multiple of 64"
    return "" if window is None or window < time else "the window holds all keys"


def attention(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G K"],
    window: int | None = None,
) -> Float[Array, "B T H K"]:
    """Each query sees the keys up to its own, the last `window` of them if given."""
    # Heads of keys come first: they are what a mesh must divide.
    tokens = tuple(x[:, None] for x in (key, value, query))
    return _on_mesh(tokens, window=window)[1][:, 0]


def _one_share(tokens, window):
    """The kernel on a device's share: tokens [B, 1, T, H, K]."""
    key, value, query = (jnp.swapaxes(x[:, 0], 1, 2) for x in tokens)
    kernel = _kernel(query.shape[1], query.shape[2], window)
    # Scaled before the product: a query has fewer numbers than it has scores.
    y = jax.vmap(kernel)(query * query.shape[-1] ** -0.5, key, value)
    return (), jnp.swapaxes(y, 1, 2)[:, None]


_on_mesh = chunkwise(_one_share)


def _kernel(heads, time, window):
    shape = (time, time)
    mask = masks.CausalMask(shape)
    if window is not None:
        mask = masks.LocalMask(shape, (window - 1, 0), 0)
    block = next(size for size in range(BLOCK, 0, -LANES) if time % size == 0)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    make = functools.partial(splash.make_splash_mha, head_shards=1, q_seq_shards=1)
    return make(masks.MultiHeadMask([mask] * heads), block_sizes=sizes)
