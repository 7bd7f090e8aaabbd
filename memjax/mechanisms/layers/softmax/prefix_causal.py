"""Attention of Elastic Memory: to all memory tokens, and causally to the open block.

    O = softmax(Q [K_mem, K]ᵀ / √K + mask) [V_mem, V]                   (eqs. 9, 10)

The mask is a rectangle over the memory tokens and a triangle over the block. Memory
tokens have no position, as a coefficient spans the whole past. Song et al. (2026),
"Towards Compressive and Scalable Recurrent Memory".

Shapes: B batch, n blocks, L block, H query heads, G key-value heads, K head width,
M memory tokens, N order.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from memjax.mechanisms.layers import projections
from memjax.mechanisms.layers.heads import HeadsConfig
from memjax.mechanisms.layers.saturating_counter import advanced
from memjax.mechanisms.layers.softmax import cached, on_tpu
from memjax.mechanisms.layers.softmax import dot_product_attention as attend


class Tokens(NamedTuple):
    """Queries, keys and values of whole blocks, without RoPE."""

    query: Float[Array, "B n L H K"]
    key: Float[Array, "B n L G K"]
    value: Float[Array, "B n L G K"]


class Memory(NamedTuple):
    """Memory tokens of each block, of all blocks before it."""

    keys: Float[Array, "B n M G K"]
    values: Float[Array, "B n M G K"]


class OpenBlock(NamedTuple):
    """Tokens of the open block, the newest included, of J channels."""

    keys: Float[Array, "B L J"]  # with RoPE of their places in the block
    values: Float[Array, "B L J"]
    newest: Int[Array, " B"]  # its place in the block


def by_blocks(
    config: HeadsConfig,
    tokens: Tokens,
    memory: Memory,
    length: Int[Array, " B"],
    in_stream: bool,
) -> Float[Array, "B n L H K"]:
    """Attention of each block to all memory tokens and causally to itself.

    Args:
        config: for RoPE.
        tokens: of the blocks.
        memory: of each block.
        length: tokens before the first block; without any there is no memory.
        in_stream: whether RoPE counts on from block to block.
    """
    q, k, v = tokens
    blocks, block = q.shape[1:3]
    positions = jnp.arange(block, dtype=jnp.int32)
    # Tokens before each block: 0 says that there is no memory yet, and where RoPE
    # counts from in a stream.
    before = jnp.arange(blocks, dtype=jnp.int32)[None] * block
    first = advanced(length[:, None], before)
    if in_stream:
        positions = first[..., None] + positions[None, None]

    def rope(x):
        return projections.apply_rope(config, x, positions)

    # Before the first block is compressed the coefficients are zeros, which are no
    # memory.
    given = (rope(q), rope(k), v, memory.keys, memory.values, first > 0)
    if on_tpu.unsupported(q, k):
        return _masked_blocks(*given)
    return jax.lax.platform_dependent(
        *given, tpu=on_tpu.with_memory, default=_masked_blocks
    )


def _masked_blocks(query, key, value, memory_key, memory_value, remembers):
    """Attention with the whole mask."""
    block, samples = query.shape[2], memory_key.shape[2]
    causal = jnp.tril(jnp.ones((block, block), bool))
    seen = jnp.broadcast_to(remembers[..., None, None], (*query.shape[:3], samples))
    own = jnp.broadcast_to(causal, (*query.shape[:3], block))
    mask = jnp.concatenate([seen, own], axis=-1)

    def join(memory, tokens):
        return jnp.concatenate([memory, tokens], axis=2)

    return attend.blocks(query, join(memory_key, key), join(memory_value, value), mask)


def one_token(
    config: HeadsConfig,
    query: Float[Array, "B H K"],
    coefficients: tuple[Float[Array, "B G N K"], Float[Array, "B G N K"]],
    basis: Float[Array, "M N"],
    block: OpenBlock,
    length: Int[Array, " B"],
    in_stream: bool,
) -> Float[Array, "B H K"]:
    """The newest token's attention, in float32: no memory token is formed.

    Args:
        config: for RoPE.
        query: without RoPE.
        coefficients: of the keys and the values before the block.
        basis: R, whose product with the coefficients are the memory tokens.
        block: the open one.
        length: tokens before the block; without any there is no memory.
        in_stream: whether RoPE counts on from block to block.
    """
    (b, heads, width), (memory_keys, memory_values) = query.shape, coefficients

    def rope(at):
        return projections.apply_rope(config, query.astype(jnp.float32)[:, None], at)

    slots = jnp.arange(block.keys.shape[1], dtype=jnp.int32)
    place = block.newest[:, None]
    # Distances inside of the block are the same wherever it begins.
    to_block = cached.rows_with_mass(
        rope(place), block.keys, block.values, (slots[None] <= place)[:, None]
    )
    now = length[:, None] + place if in_stream else place
    q = rope(now).reshape(b, config.num_kv_heads, -1, width) * width**-0.5
    # R (C q): N K + M N products a query, where forming the memory tokens R C takes
    # M N K.
    in_basis = jnp.einsum("bgqk,bgnk->bgqn", q, memory_keys)
    scores = jnp.einsum("bgqn,mn->bgqm", in_basis, basis)
    mass = jax.nn.logsumexp(scores, axis=-1)
    # The weights go back through R, again without forming a memory token.
    in_basis = jnp.einsum("bgqm,mn->bgqn", jnp.exp(scores - mass[..., None]), basis)
    y = jnp.einsum("bgqn,bgnk->bgqk", in_basis, memory_values)
    # Without a block before there is no memory; the newest token sees itself.
    mass = jnp.where(length[:, None, None] > 0, mass, -jnp.inf).reshape(b, 1, heads)
    return attend.join(to_block, (y.reshape(b, 1, heads, width), mass))[:, 0]
