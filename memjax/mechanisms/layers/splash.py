"""Causal attention of whole sequences on a TPU: jax's splash kernel.

It keeps no scores, and passes over blocks that no query of a block sees. `unsupported`
says what it does not take.
"""

import functools
from typing import Any

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

# Queries and keys of a block, at most, by the fewest tokens they are for: the fastest
# of 256, 512 and 1,024 for 2,048 and for 8,192 tokens, counted for a v5e. One kernel
# for both gradients takes longer: it adds up partial sums of the queries' in memory.
BLOCKS = {8192: 1024, 0: 512}
# The kernel's blocks are whole registers along the tokens.
LANES = 128


def unsupported(query: Any, key: Any) -> str:
    """Why the kernel does not take queries [B, T, H, K] of these keys; "" if it does.

    Both have a shape and a dtype.
    """
    time, width = query.shape[1], query.shape[-1]
    if query.dtype != jnp.bfloat16:
        return f"tokens are {query.dtype}, not bfloat16"
    if key.shape[1] != time or time % LANES:
        return f"queries must be those of all {key.shape[1]} keys, a multiple of 128"
    if width % 64:
        return f"heads are {width} wide, no multiple of 64"
    return ""


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
    attend = kernel(query.shape[1], query.shape[2], window)
    # Scaled before the product: a query has fewer numbers than it has scores.
    y: Any = jax.vmap(attend)(query * query.shape[-1] ** -0.5, key, value)
    return (), jnp.swapaxes(y, 1, 2)[:, None]


_on_mesh = chunkwise(_one_share, says_what_varies=False)


def kernel(
    heads: int, time: int, window: int | None = None
) -> splash.SplashAttentionKernel:
    """The kernel of one batch element: q [H, T, K], k and v [G, T, K]."""
    shape = (time, time)
    mask = masks.CausalMask(shape)
    if window is not None:
        mask = masks.LocalMask(shape, (window - 1, 0), 0)
    largest = next(size for least, size in BLOCKS.items() if time >= least)
    block = next(size for size in range(largest, 0, -LANES) if time % size == 0)
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
