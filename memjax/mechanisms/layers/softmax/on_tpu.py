"""Causal attention of whole sequences, and behind a memory or a cache, on a TPU.

Kernels keep no scores, and pass over blocks of keys that no query of a block sees.
Heads of 64 channels, each with keys of its own, take `causal_attention`, which reads
them without a transpose; all others take splash, jax's kernel. `unsupported` gives the
reason against both.
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
from jaxtyping import Array, Bool, Float, Int

from memjax_kernels import heads_first, heads_last
from memjax_kernels._src import causal_attention
from memjax_kernels._src.causal_attention import READS
from memjax_kernels._src.causal_attention.blocks import block_size
from memjax_kernels._src.common.packs.tiles import LANES
from memjax_kernels._src.common.partition import chunkwise

# Queries and keys of a block, at most, by the fewest tokens they are for: the fastest
# of 256, 512 and 1,024 for 2,048 and for 8,192 tokens, counted for a v5e. One kernel
# for both gradients takes longer: it adds up partial sums of the queries' in memory.
BLOCKS = {8192: 1024, 0: 512}
# Tokens that are no multiple of 128 are filled up to whole blocks of 512, which pays
# from so many on. A token and head, forward: 546 tokens took 24 cycles, XLA's upper end
# is 11, and 2,000 took 23, XLA's upper end is 52.
LEAST = 1024


def unsupported(query: Any, key: Any) -> str:
    """Why no kernel takes queries [..., T, H, K] of these keys; "" if one does.

    Both have a shape and a dtype.
    """
    time, width = query.shape[-3], query.shape[-1]
    if query.dtype != jnp.bfloat16:
        return f"tokens are {query.dtype}, not bfloat16"
    if key.shape[-3] != time:
        return f"queries must be those of all {key.shape[-3]} keys"
    if time % LANES and time < LEAST:
        return f"{time} tokens are no multiple of {LANES}, and fewer than {LEAST}"
    if width % 64:
        return f"heads are {width} wide, no multiple of 64"
    return ""


def attention(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G K"],
    window: int | None = None,
    documents: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T H K"]:
    """Each query sees the keys up to its own, the last `window` of them if given.

    Where `documents` are given, those of the same number alone.
    """
    time = query.shape[1]
    query, key, value = (_filled(x) for x in (query, key, value))
    if documents is not None:
        # No token sees what lies behind it, whatever its document.
        documents = jnp.pad(documents, ((0, 0), (0, query.shape[1] - time)))
    # Heads of keys come first: they are what a mesh must divide.
    tokens = (*(x[:, None] for x in (key, value, query)), documents)
    return _on_mesh(tokens, window=window)[1][:, 0, :time]


def with_memory(
    query: Float[Array, "B n L H K"],
    key: Float[Array, "B n L G K"],
    value: Float[Array, "B n L G K"],
    memory_key: Float[Array, "B n M G K"],
    memory_value: Float[Array, "B n M G K"],
    remembers: Bool[Array, "B n"],
) -> Float[Array, "B n L H K"]:
    """Queries see the keys of their block up to their own, and the block's memory.

    Blocks whose `remembers` is False have no memory.
    """
    time = query.shape[2]
    own = [_filled(x) for x in (key, value, query)]
    tokens = (memory_key, memory_value, *own, (remembers, None))
    return _blocks_on_mesh(tokens)[1][:, :, :time]


def behind_slots(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G K"],
    slot_key: Float[Array, "B S G K"],
    slot_value: Float[Array, "B S G K"],
    seen: Bool[Array, "B S"],
    visible: Bool[Array, "B T"],
) -> Float[Array, "B T H K"]:
    """Queries see the slots that are seen, and tokens up to their own if visible."""
    time = query.shape[1]
    key, value, query = (_filled(x) for x in (key, value, query))
    visible = jnp.pad(visible, ((0, 0), (0, query.shape[1] - time)))
    arrays = [x[:, None] for x in (slot_key, slot_value, key, value, query)]

    # Flags with an axis for heads are divided among devices as all else is.
    def by_head(flags):
        return jnp.broadcast_to(
            flags[:, None, :, None], (*flags[:, None].shape, key.shape[2])
        )

    tokens = (*arrays, (by_head(seen), by_head(visible)))
    return _blocks_on_mesh(tokens)[1][:, 0, :time]


def _filled(x):
    """Tokens [..., T, H, K] with zeros behind them, if they are no multiple of 128."""
    time = x.shape[-3]
    more = -time % BLOCKS[0] if time % LANES else 0
    return jnp.pad(x, ((0, 0),) * (x.ndim - 3) + ((0, more), (0, 0), (0, 0)))


def splash_attention(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T G K"],
    value: Float[Array, "B T G K"],
    window: int | None = None,
    documents: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T H K"]:
    """`attention` of one device by jax's kernel."""
    attend = kernel(query.shape[2], query.shape[1], window)
    ids = None if documents is None else splash.SegmentIds(documents, documents)
    key, value = heads_first(key), heads_first(value)
    y: Any = jax.vmap(attend)(_scaled_heads(query), key, value, ids)
    return heads_last(y)


def _one_share(tokens, window):
    """A kernel on a device's share: tokens [B, 1, T, H, K]."""
    *heads, documents = tokens
    key, value, query = (x[:, 0] for x in heads)
    if documents is None and not causal_attention.unsupported(query, key):
        y = causal_attention.causal_attention(query, key, value, window)
    else:
        y = splash_attention(query, key, value, window, documents)
    return (), y[:, None]


def _scaled_heads(query):
    """Queries [B, T, H, K] as the kernel takes them."""
    # Scaled before the product: a query has fewer numbers than it has scores.
    return heads_first(query, query.shape[-1] ** -0.5)


def _blocks_of_one_share(tokens):
    """The kernel on a device's share: tokens [B, n, L, H, K], and which are seen.

    Flags of the memory are [B, n] or [B, n, M, G], those of the tokens None or
    [B, n, L, G].
    """
    memory_key, memory_value, key, value, query, flags = tokens
    length, samples = query.shape[2], memory_key.shape[2]
    attend, unused = memory_kernel(query.shape[3], length, samples)

    def one_block(query, key, value, flags):
        # Keys of another segment than a query's are hidden from it.
        ones = jnp.ones(length, jnp.int32)
        of_memory, of_tokens = flags
        of_memory = jnp.broadcast_to(of_memory.astype(jnp.int32), samples)
        of_tokens = ones if of_tokens is None else of_tokens.astype(jnp.int32)
        segments = [jnp.zeros(unused, jnp.int32), of_memory, of_tokens]
        ids = splash.SegmentIds(ones, jnp.concatenate(segments))
        return attend(query, key, value, segment_ids=ids)

    def joined(*parts):
        # What is not used lies before the memory, so that the mask is a causal one.
        before = ((0, 0), (0, 0), (unused, 0), (0, 0), (0, 0))
        keys = blocks(jnp.pad(jnp.concatenate(parts, axis=2), before))
        # By XLA, which copies them here anyway. Before a kernel it rounds gradients in
        # the product of Elastic Memory's compression, which takes 19 times as long so.
        return jnp.swapaxes(keys, 1, 2)

    def blocks(x):
        return x.reshape(-1, *x.shape[2:])

    k, v = joined(memory_key, key), joined(memory_value, value)

    def of_one_head(x):
        return blocks(x if x.ndim == 2 else x[..., 0])

    given = (_scaled_heads(blocks(query)), k, v, jax.tree.map(of_one_head, flags))
    y: Any = jax.vmap(one_block)(*given)
    return (), heads_last(y).reshape(query.shape)


_on_mesh = chunkwise(_one_share, says_what_varies=False)
_blocks_on_mesh = chunkwise(_blocks_of_one_share, says_what_varies=False)


def kernel(
    heads: int, time: int, window: int | None = None
) -> splash.SplashAttentionKernel:
    """The kernel of one batch element: q [H, T, K], k and v [G, T, K]."""
    shape = (time, time)
    mask = masks.CausalMask(shape)
    if window is not None:
        mask = masks.LocalMask(shape, (window - 1, 0), 0)
    block = _block(time)
    return _kernel(mask, heads, block, block)


def memory_kernel(
    heads: int, length: int, samples: int
) -> tuple[splash.SplashAttentionKernel, int]:
    """The kernel of one block with its memory, and how many keys it has before both."""
    keys = samples + length
    # Many keys come in large blocks, however few queries there are.
    many = max(BLOCKS)
    largest = BLOCKS[many] if keys >= many else _block(length)
    # The size with the fewest keys that are not used; of those the largest.
    sizes = [size // LANES * LANES for size in (largest, 3 * largest // 4)]

    def padded(size):
        return -(-keys // size) * size

    block = min((size for size in sizes if size), key=padded)
    mask = masks.CausalMask((length, padded(block)), padded(block) - length)
    return _kernel(mask, heads, _block(length), block), padded(block) - keys


def _block(time):
    largest = next(size for least, size in BLOCKS.items() if time >= least)
    return block_size(time, largest)


def _kernel(mask, heads, block_q, block_kv):
    """Of one mask for all heads."""
    sizes = splash.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=block_kv,
        block_q_dq=block_q,
        block_kv_dq=block_kv,
    )
    make = functools.partial(splash.make_splash_mha, head_shards=1, q_seq_shards=1)
    mask = masks.MultiHeadMask([mask] * heads)
    return make(mask, block_sizes=sizes, residual_checkpoint_name=READS)
