"""M+'s two passes through one layer: writing a chunk into memory, and reading with it.

    write:  x_l = [bos_l ; m_l ; h], its last K rows + p;  y = layer_l(x_l)
            new_l = y[-K:] (or x_l[-K:] with stored="input");  h ← y[-T:]
    read:   x_l = [bos_l ; retrieved_l ; pool_l ; h]; only h has queries, and keys and
            values of the rows before h are cached

h are the hidden states of the chunk or of the tokens that read, m_l the newest K rows
of the pool. Memory rows are hidden states of the residual stream; they pass the layer's
norm when they are read. Wang et al. (2025), https://arxiv.org/abs/2502.00592, section
3.1. bos_l, p and storing outputs follow the program; the paper's Figure 1 leaves open
which is stored.

Shapes: B batch, T tokens, K memory tokens, P positions before the tokens, S positions
of the KV cache, D model, G key heads, H head width.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from memjax.mechanisms.layers import projections
from memjax.mechanisms.layers.softmax import cached
from memjax.mechanisms.layers.softmax import dot_product_attention as attend
from memjax.models import ragged
from memjax.models.language_model.config import ModelConfig
from memjax.models.language_model.layers import BlockParams, normalize, run_block


class Slots(NamedTuple):
    """One layer's keys and values: of rows by head, or a row of all heads a slot."""

    keys: Float[Array, "B S G H"] | Float[Array, "B S J"]
    values: Float[Array, "B S G H"] | Float[Array, "B S J"]


#: Like `cached.from_rows`, behind a first argument: the queries without RoPE.
Attention = Callable[[Array, Array, Array, Array, Array, Array], Array]


def write_layer(
    config: ModelConfig,
    block: BlockParams,
    x: Float[Array, "B W D"],
    visible: Bool[Array, "B W"] | None,
    positions: Int[Array, "B W"],
    queries: int,
) -> Float[Array, "B Q D"]:
    """The layer's output at the last `queries` positions; the others are context."""
    heads, first = config.heads, x.shape[1] - queries

    def mix(params, memory, normed):
        q = projections.query_projection(heads, params, normed)
        q = projections.apply_rope(heads, q, positions[:, first:])
        # All positions are keys and values; queries are the last ones alone.
        made = memory_slots(config, block, x)
        k = projections.apply_rope(heads, made.keys, positions)
        return memory, projections.output_projection(
            params, attend.causal(q, k, made.values, visible), normed
        )

    return run_block(config, mix, block, None, x[:, first:], config.style(0))[1]


def memory_slots(
    config: ModelConfig, block: BlockParams, rows: Float[Array, "B P D"]
) -> Slots:
    """Keys before RoPE, and values, of memory rows, in the dtype of the rows."""
    normed = normalize(block.mechanism_norm, rows, config.norm_epsilon)
    mechanism = block.mechanism
    k = projections.key_projection(config.heads, mechanism, normed)
    return Slots(k, projections.linear(normed, mechanism.value, mechanism.value_bias))


def prefix_slots(
    config: ModelConfig,
    block: BlockParams,
    rows: Float[Array, "B P D"],
    visible: Bool[Array, "B P"],
    retrieved: Int[Array, " B"] | None = None,
) -> Slots:
    """Keys and values of memory rows, with RoPE positions that count visible rows.

    `retrieved` further rows take the positions right after that of bos.
    """
    # Invisible rows before the first visible one would count as -1.
    positions = jnp.maximum(jnp.cumsum(visible, axis=1, dtype=jnp.int32) - 1, 0)
    if retrieved is not None:
        positions = positions.at[:, 1:].add(retrieved[:, None])
    made = memory_slots(config, block, rows)
    k = projections.apply_rope(config.heads, made.keys, positions)
    return Slots(k, made.values)


def read_layer(
    config: ModelConfig,
    block: BlockParams,
    slots: Slots,
    visible: Bool[Array, "B S"],
    start: Int[Array, " B"],
    places: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    h: Float[Array, "B T D"],
    attention: Attention | None = None,
) -> tuple[Slots, Float[Array, "B T D"]]:
    """Adds tokens to a layer's cache; returns it and the layer's output.

    Args:
        config: of the backbone.
        block: the layer.
        slots: keys and values of the prefix and of earlier tokens, a slot a row.
        visible: which positions may be attended to, the new tokens included.
        start: index in the cache of the first new token.
        places: index in the cache of each; one beyond the end is dropped.
        positions: RoPE position of each.
        h: the layer's input.
        attention: replaces attention to the cache; see `Attention`.
    """
    heads = config.heads

    def mix(params, slots, normed):
        plain, k, v = projections.qkv_projection(heads, params, normed)
        q = projections.apply_rope(heads, plain, positions)
        k = projections.apply_rope(heads, k, positions)

        def joined(x):
            return x.reshape(*x.shape[:2], -1)

        def write(old, new):
            return ragged.write(old, places, joined(new).astype(old.dtype))

        slots = jax.tree.map(write, slots, Slots(k, v))
        # Without a copy where the cache has the format of the activations.
        keys, values = slots.keys.astype(q.dtype), slots.values.astype(q.dtype)
        if attention is None:
            y = cached.from_rows(q, keys, values, start, visible)
        else:

            def split(x):
                return x.reshape(*x.shape[:2], *k.shape[2:])

            y = attention(plain, q, split(keys), split(values), start, visible)
        return slots, projections.output_projection(params, y, normed)

    return run_block(config, mix, block, slots, h, config.style(0))


def compress(
    config: ModelConfig,
    blocks: tuple[BlockParams, ...],
    bos: Float[Array, "L D"],
    position: Float[Array, " D"],
    memory: Float[Array, "B L K D"],
    real: Bool[Array, " B"],
    h: Float[Array, "B T D"],
    lengths: Int[Array, " B"] | None,
    inputs: bool,
) -> tuple[Float[Array, "B L K D"], list[Float[Array, "B T D"]]]:
    """Compresses a chunk to K memory tokens per layer.

    With fewer than K tokens the newest of the old rows become new ones again.

    Args:
        config: of the backbone.
        blocks: with the adapter that writes.
        bos: one vector a layer.
        position: p, added to the last K rows before every layer.
        memory: the pool's newest K rows.
        real: False where a batch element has no such rows; they are not visible then.
        h: embeddings of the chunk.
        lengths: number of tokens of each batch element, 1 to T; None is T for all.
        inputs: stores the layers' inputs instead of their outputs.

    Returns:
        The memory tokens, and what each layer was given for the chunk's tokens.
    """
    b, t, d = h.shape
    k = memory.shape[2]
    width = 1 + k + t
    # Without lengths all sequences end together, and nothing is shifted.
    late = jnp.zeros(b, jnp.int32) if lengths is None else t - lengths

    # Sequences are aligned at the right, so that the last K positions are the same.
    def push(x):
        return x if lengths is None else jax.vmap(_roll)(x, late)

    places = jnp.arange(width, dtype=jnp.int32)[None] - late[:, None]
    seen = (places >= 0) & (real[:, None] | (places == 0) | (places > k))
    is_token = (places > k)[..., None]
    first = jnp.concatenate([jnp.zeros((b, 1 + k, d), h.dtype), h], axis=1)
    tokens, new, given = push(first), [], []
    # Where the chunk's tokens are, once they are aligned at the right.
    at = late[:, None] + jnp.arange(1 + k, width, dtype=jnp.int32)[None]
    at = jnp.minimum(at, width - 1)
    for layer, block in enumerate(blocks):
        start = jnp.broadcast_to(bos[layer][None, None], (b, 1, d))
        rows = jnp.concatenate([start, memory[:, layer]], axis=1).astype(h.dtype)
        x = push(jnp.concatenate([rows, jnp.zeros_like(h)], axis=1))
        # Hidden states of the tokens go on from layer to layer, while bos and memory
        # are each layer's own.
        x = jnp.where(is_token, tokens, x)
        given.append(tokens[:, 1 + k :] if lengths is None else ragged.take(tokens, at))
        x = x.at[:, -k:].add(position[None, None].astype(h.dtype))
        # The tokens' own outputs feed the next layer, which the last one does not have.
        # With fewer than K tokens the last K positions reach into the old memory.
        queries = k if layer == len(blocks) - 1 else max(t, k)
        y = write_layer(config, block, x, seen, jnp.maximum(places, 0), queries)
        new.append((x if inputs else y)[:, -k:].astype(jnp.float32))
        # Keeps the width: what is put before the tokens is replaced in the next layer.
        tokens = jnp.concatenate([tokens[:, : width - queries], y], axis=1)
    return jnp.stack(new, axis=1), given


def _roll(x, by):
    return jnp.roll(x, by, axis=0)
