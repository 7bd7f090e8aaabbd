"""M+'s two passes through one layer: writing a chunk into memory, and cache with it.

    write:  x_l = [bos_l ; m_l ; h], its last K rows + p;  y = layer_l(x_l)
            new_l = y[-K:] (the layer's output; or x_l[-K:], its input), h ← y[-T:]
    read:   x_l = [bos_l ; retrieved_l ; pool_l ; h]: what stands before h gives keys
            and values alone, made once and cached

Memory rows are vectors of the residual stream, normalised where they are read. Wang et
al. (2025), https://arxiv.org/abs/2502.00592, section 3.1; bos_l, p and the storing of
outputs are the program's; the paper's Figure 1 can be read either way.

Shapes: B batch, T tokens, K memory tokens, P slots before the tokens, S slots, D model,
G key heads, H head width.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from memjax.mechanisms.layers import dot_product_attention as attend
from memjax.mechanisms.layers import projections
from memjax.models import ragged as segments
from memjax.models.language_model.config import ModelConfig
from memjax.models.language_model.layers import BlockParams, normalize, run_block


class Slots(NamedTuple):
    """Keys and values of one layer, as attention caches them."""

    keys: Float[Array, "B S G H"]
    values: Float[Array, "B S G H"]


#: Like `attend.from_cache`, behind a first argument: the queries without RoPE.
Attention = Callable[[Array, Array, Array, Array, Array, Array], Array]


def write_layer(
    config: ModelConfig,
    block: BlockParams,
    x: Float[Array, "B W D"],
    visible: Bool[Array, "B W"] | None,
    positions: Int[Array, "B W"],
    queries: int,
) -> Float[Array, "B Q D"]:
    """The layer's output for the last `queries` rows; those before are only seen."""
    heads, first = config.heads, x.shape[1] - queries

    def mix(params, memory, normed):
        q = projections.linear(normed, params.query, params.query_bias)
        q = projections.apply_rope(heads, q, positions[:, first:])
        made = memory_slots(config, block, x)
        k = projections.apply_rope(heads, made.keys, positions)
        return memory, projections.output_projection(
            params, attend.causal(q, k, made.values, visible)
        )

    return run_block(config, mix, block, None, x[:, first:])[1]


def memory_slots(
    config: ModelConfig, block: BlockParams, rows: Float[Array, "B P D"]
) -> Slots:
    """Keys, without RoPE, and values of memory rows, in the dtype of the rows."""
    normed = normalize(block.mixer_norm, rows, config.norm_epsilon)
    mixer = block.mixer
    k = projections.linear(normed, mixer.key, mixer.key_bias)
    return Slots(k, projections.linear(normed, mixer.value, mixer.value_bias))


def prefix_slots(
    config: ModelConfig,
    block: BlockParams,
    rows: Float[Array, "B P D"],
    visible: Bool[Array, "B P"],
    beside: Int[Array, " B"] | None = None,
) -> Slots:
    """Keys and values of memory rows; positions count the visible ones from 0.

    With so many rows `beside` them, which take the positions behind the first slot's.
    """
    positions = jnp.maximum(jnp.cumsum(visible, axis=1, dtype=jnp.int32) - 1, 0)
    if beside is not None:
        positions = positions.at[:, 1:].add(beside[:, None])
    made = memory_slots(config, block, rows)
    k = projections.apply_rope(config.heads, made.keys, positions)
    return Slots(k.astype(jnp.float32), made.values.astype(jnp.float32))


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
    """Reads tokens into the slots; returns these and the layer's output.

    Args:
        config: of the backbone.
        block: the layer.
        slots: with the prefix, and the tokens before.
        visible: which slots may be seen, those of the new tokens among them.
        start: slot of the first new token.
        places: slot of each; one beyond the last is dropped.
        positions: RoPE's, of each.
        h: what the layer is given.
        attention: of what to see more than the slots, see `Attention`.
    """
    heads = config.heads

    def mix(params, slots, normed):
        plain, k, v = projections.qkv_projection(params, normed)
        q = projections.apply_rope(heads, plain, positions)
        k = projections.apply_rope(heads, k, positions)
        new = Slots(k.astype(jnp.float32), v.astype(jnp.float32))
        write = lambda old, new: segments.write(old, places, new)
        slots = jax.tree.map(write, slots, new)
        cache = (slots.keys.astype(q.dtype), slots.values.astype(q.dtype))
        if attention is None:
            y = attend.from_cache(q, *cache, start, visible)
        else:
            y = attention(plain, q, *cache, start, visible)
        return slots, projections.output_projection(params, y)

    return run_block(config, mix, block, slots, h)


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
) -> Float[Array, "B L K D"]:
    """The new memory of a chunk, without changing the old one.

    With fewer than K tokens the last of the old rows are written again.

    Args:
        config: of the backbone.
        blocks: with the adapter that writes.
        bos: one vector a layer.
        position: p, added to the last K rows before every layer.
        memory: the pool's last K rows.
        real: whether the row of the batch has them; else they are not seen.
        h: embeddings, those of a row first.
        lengths: tokens of each row, 1 to T; None is T in all.
        inputs: the memory is what the layers were given, not what they made of it.
    """
    b, t, d = h.shape
    k = memory.shape[2]
    width = 1 + k + t
    late = jnp.zeros(b, jnp.int32) if lengths is None else t - lengths
    # Each row ends at the right edge, so that the last K rows are everywhere the last.
    push = lambda x: x if lengths is None else jax.vmap(_roll)(x, late)
    places = jnp.arange(width, dtype=jnp.int32)[None] - late[:, None]
    seen = (places >= 0) & (real[:, None] | (places == 0) | (places > k))
    is_token = (places > k)[..., None]
    first = jnp.concatenate([jnp.zeros((b, 1 + k, d), h.dtype), h], axis=1)
    tokens, new = push(first), []
    for layer, block in enumerate(blocks):
        start = jnp.broadcast_to(bos[layer][None, None], (b, 1, d))
        rows = jnp.concatenate([start, memory[:, layer]], axis=1).astype(h.dtype)
        x = push(jnp.concatenate([rows, jnp.zeros_like(h)], axis=1))
        x = jnp.where(is_token, tokens, x)
        x = x.at[:, -k:].add(position[None, None].astype(h.dtype))
        queries = k if layer == len(blocks) - 1 else max(t, k)
        y = write_layer(config, block, x, seen, jnp.maximum(places, 0), queries)
        new.append((x if inputs else y)[:, -k:].astype(jnp.float32))
        tokens = jnp.concatenate([tokens[:, : width - queries], y], axis=1)
    return jnp.stack(new, axis=1)


def _roll(x, by):
    return jnp.roll(x, by, axis=0)
