"""Attention of Elastic Memory: to all memory tokens, and causally to the open block.

    O = softmax(Q [K_mem, K]ᵀ / √K + trapezoid) [V_mem, V]              (eqs. 9, 10)

The mask is a rectangle over the memory tokens beside a triangle over the block. Memory
tokens have no position, as a coefficient spans the whole past. Song et al. (2026),
"Towards Compressive and Scalable Recurrent Memory".

Shapes: B batch, n blocks, L block, H query heads, G key-value heads, K head width,
M memory tokens, N order.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from memjax.mechanisms.layers import projections
from memjax.mechanisms.layers.projections import HeadsConfig
from memjax.mechanisms.layers.rope import tables as rope_tables
from memjax.mechanisms.layers.softmax import dot_product_attention as attend
from memjax.mechanisms.layers.softmax import splash


class Tokens(NamedTuple):
    """Queries, keys and values of whole blocks, without RoPE."""

    query: Float[Array, "B n L H K"]
    key: Float[Array, "B n L G K"]
    value: Float[Array, "B n L G K"]


class Memory(NamedTuple):
    """What each block remembers of all before it."""

    keys: Float[Array, "B n M G K"]
    values: Float[Array, "B n M G K"]


class OpenBlock(NamedTuple):
    """Tokens of the block that is being filled, without RoPE, the newest included."""

    keys: Float[Array, "B L G K"]
    values: Float[Array, "B L G K"]
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
    first = length[:, None] + jnp.arange(blocks, dtype=jnp.int32)[None] * block
    if in_stream:
        positions = first[..., None] + positions[None, None]
    rope = lambda x: projections.apply_rope(config, x, positions)
    # Before the first block is compressed the coefficients are zeros, which are no
    # memory.
    given = (rope(q), rope(k), v, memory.keys, memory.values, first > 0)
    if splash.unsupported(q, k):
        return _masked_blocks(*given)
    return jax.lax.platform_dependent(
        *given, tpu=splash.with_memory, default=_masked_blocks
    )


def _masked_blocks(query, key, value, memory_key, memory_value, remembers):
    """Attention with the whole mask."""
    block, samples = query.shape[2], memory_key.shape[2]
    causal = jnp.tril(jnp.ones((block, block), bool))
    seen = jnp.broadcast_to(remembers[..., None, None], (*query.shape[:3], samples))
    own = jnp.broadcast_to(causal, (*query.shape[:3], block))
    mask = jnp.concatenate([seen, own], axis=-1)
    join = lambda memory, tokens: jnp.concatenate([memory, tokens], axis=2)
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
    (b, _, width), (memory_keys, memory_values) = query.shape, coefficients
    slots = block.keys.shape[1]
    positions, now = jnp.arange(slots, dtype=jnp.int32), block.newest[:, None]
    if in_stream:
        positions, now = length[:, None] + positions[None], length[:, None] + now
    rope = lambda x, at: projections.apply_rope(config, x, at)
    q = rope(query.astype(jnp.float32)[:, None], now)[:, 0]
    q = q.reshape(b, config.num_kv_heads, -1, width) * width**-0.5

    # R (C q): N K + M N products a query, where forming the memory tokens R C takes
    # M N K.
    in_basis = jnp.einsum("bgqk,bgnk->bgqn", q, memory_keys)
    to_memory = jnp.einsum("bgqn,mn->bgqm", in_basis, basis)
    to_block = jax.lax.platform_dependent(
        *(q, block.keys, positions),
        tpu=functools.partial(_scores_in_place, config),
        default=lambda q, keys, at: jnp.einsum("bgqk,blgk->bgql", q, rope(keys, at)),
    )
    # The newest token sees itself, so that no softmax is over an empty set.
    seen = jnp.arange(slots, dtype=jnp.int32)[None] <= block.newest[:, None]
    samples = basis.shape[0]
    mask = jnp.concatenate(
        [jnp.broadcast_to(length[:, None] > 0, (b, samples)), seen], axis=1
    )
    scores = jnp.concatenate([to_memory, to_block], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1, where=mask[:, None, None])
    memory, own = jnp.split(weights, [samples], axis=-1)
    # The weights go back through R, again without forming a memory token.
    in_basis = jnp.einsum("bgqm,mn->bgqn", memory, basis)
    y = jnp.einsum("bgqn,bgnk->bgqk", in_basis, memory_values)
    y += jax.lax.platform_dependent(
        *(own, block.values),
        tpu=_read_in_place,
        default=lambda own, values: jnp.einsum("bgql,blgk->bgqk", own, values),
    )
    return y.reshape(query.shape)


def _scores_in_place(config, query, keys, positions):
    """Scores of keys with RoPE, which are read once, where they lie.

    A query is turned back by each key's position instead: a product of both is the
    same, and keys with RoPE are not made. For (q1, q2) in half-split layout that is
    q cos + (q2, -q1) sin.
    """
    turned = query[:, None]
    if config.rope_theta is not None:
        width, theta = query.shape[-1], config.rope_theta
        tables = rope_tables(width, positions, theta, config.rope_scaling)
        # [L, K] or [B, L, K] -> [B or 1, L, 1, 1, K].
        cos, sin = (
            jnp.tile(table, 2).reshape(-1, keys.shape[1], 1, 1, width)
            for table in tables
        )
        first, second = jnp.split(query, 2, axis=-1)
        partners = jnp.concatenate([second, -first], axis=-1)
        turned = turned * cos + partners[:, None] * sin
    scores = (turned * keys[:, :, :, None]).sum(axis=-1)
    return jnp.moveaxis(scores, 1, -1)


def _read_in_place(weights, values):
    """Weighted values, which are read where they lie."""
    weights = jnp.moveaxis(weights, -1, 1)[..., None]
    return (weights * values[:, :, :, None]).sum(axis=1)
