"""Builds and extends the KV cache of a read.

In every layer the tokens attend to [bos ; retrieved rows ; pool ; tokens so far]. Keys
and values of the prefix before the tokens are computed once and cached.

Shapes: B batch, L layers, T time, S positions of the cache, D model.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from memjax import mechanisms
from memjax.models.language_model.layers import normalize
from memjax.models.mplus import attention_retrieval
from memjax.models.mplus import pool as short_term_pool
from memjax.models.mplus import store as long_term_store
from memjax.models.mplus.attention_retrieval import AttentionRetriever
from memjax.models.mplus.layers import Slots, prefix_slots, read_layer
from memjax.models.mplus.state import KVCache, MPlusState
from memjax.models.mplus.weights import MPlusWeights
from memjax.nnx.params import as_arrays


def empty(weights: MPlusWeights, batch: int, first: int, slots: int) -> KVCache:
    """An empty cache; its tokens will begin at position `first`."""
    config = weights.backbone.config
    shape = (batch, slots, config.heads.num_kv_heads * config.heads.head_dim)

    def layer():
        return jnp.zeros(shape, weights.memory_dtype)

    return KVCache(
        keys=tuple(layer() for _ in range(weights.layers)),
        values=tuple(layer() for _ in range(weights.layers)),
        visible=jnp.zeros((batch, slots), bool),
        prefix_length=jnp.full(batch, first, jnp.int32),
        length=jnp.zeros(batch, jnp.int32),
        offset=jnp.zeros(batch, jnp.int32),
    )


def read_tokens(
    weights,
    cache,
    h,
    lengths,
    writes=False,
    before=None,
    attention_retriever: AttentionRetriever | None = None,
):
    """Passes tokens through all layers and adds them to the cache.

    Args:
        weights: of M+.
        cache: the tokens' predecessors.
        h: [B, T, D], embeddings of the tokens.
        lengths: [B], how many of them are real.
        writes: with the adapter that writes instead of that which reads.
        before: (layer, h) -> rows [B, P, D] before the tokens and their mask [B, P],
            for a cache that has no such rows yet.
        attention_retriever: finds further rows for each token.

    Returns:
        The cache, the features [B, T, D], and the input of each layer.
    """
    config, slots = weights.backbone.config, cache.visible.shape[1]
    times = jnp.arange(h.shape[1], dtype=jnp.int32)[None]
    start = cache.prefix_length + cache.length
    # An index behind the cache is dropped: padding is not written.
    places = jnp.where(times < lengths[:, None], start[:, None] + times, slots)
    # The length is not known inside jit, so that a full cache gives NaN and no error.
    fits = start[:, None] + times < slots
    all_slots = jnp.arange(slots, dtype=jnp.int32)[None]
    # The new tokens are visible to each other; causality is left to the attention.
    new = (all_slots >= start[:, None]) & (all_slots < (start + lengths)[:, None])
    visible, offset = cache.visible | new, cache.offset
    keys, values, inputs = [], [], []
    retrieved = _retrieved(attention_retriever)
    for layer, block in enumerate(weights.blocks(writes)):
        inputs.append(h)
        old = Slots(cache.keys[layer], cache.values[layer])
        if before is not None:
            rows, seen = before(layer, h)
            made = prefix_slots(config, block, rows, seen, retrieved)
            old = jax.tree.map(_put, old, made)
            visible = visible.at[:, : seen.shape[1]].set(seen)
            offset = _count(seen, retrieved)
        # Invisible positions take no RoPE position: with an empty memory tokens count
        # from 0.
        positions = (offset + cache.length)[:, None] + times
        attention = attention_retriever and functools.partial(
            attention_retriever.attend, layer
        )
        made, h = read_layer(
            config, block, old, visible, start, places, positions, h, attention
        )
        keys.append(made.keys)
        values.append(made.values)
    cache = cache._replace(
        keys=tuple(keys),
        values=tuple(values),
        visible=visible,
        length=cache.length + lengths,
        offset=offset,
    )
    y = jnp.where(fits[..., None], _last_norm(weights, h), jnp.nan)
    return cache, y, inputs


def _put(slots, made):
    """The cache of a layer with its prefix, [B, P, G, H]."""
    joined = made.reshape(*made.shape[:2], -1).astype(slots.dtype)
    return slots.at[:, : made.shape[1]].set(joined)


def _last_norm(weights, h):
    norm = as_arrays(weights.backbone.norm)
    return normalize(norm, h, weights.backbone.config.norm_epsilon)


def _retrieved(attention_retriever):
    """Number of rows that a token retrieves for itself; they follow bos in RoPE."""
    return None if attention_retriever is None else attention_retriever.found


def _count(seen, retrieved):
    count = seen.sum(axis=1, dtype=jnp.int32)
    return count if retrieved is None else count + retrieved


def with_bos(weights, layer, memory):
    """Rows before the tokens and their mask; bos is visible if any other row is."""
    rows, seen = zip(*memory, strict=True)
    bos = weights.bos[layer][None, None]
    bos = jnp.broadcast_to(bos, (rows[0].shape[0], 1, bos.shape[-1]))
    seen = jnp.concatenate(seen, axis=1)

    # Each by itself, so that the pool is not copied in a wider format.
    def cast(x):
        return x.astype(weights.backbone.config.dtype)

    rows = jnp.concatenate([cast(x) for x in (bos, *rows)], axis=1)
    # Without memory bos is hidden too: the model then is its backbone.
    some = jnp.any(seen, axis=1, keepdims=True)
    return rows, jnp.concatenate([some, seen], axis=1)


def valid_rows(num_valid, rows):
    """Mask [B, N] of the pool's rows that hold something: the last ones."""
    return jnp.arange(rows, dtype=jnp.int32)[None] >= rows - num_valid[:, None]


def _first(count, total):
    return jnp.arange(total, dtype=jnp.int32)[None] < count[:, None]


def prepare(
    weights: MPlusWeights, state: MPlusState, rows: Bool[Array, " B"]
) -> MPlusState:
    """Computes the open chunk's cache for batch elements in `rows` that need it."""
    # A cache stays valid until the pool changes or tokens come without being read.
    rows = rows & ~state.cache_ready

    def made(state):
        return (state.cache, state.queries, state.num_queries)

    def make():
        begun = state._replace(cache=_before_tokens(weights, state))

        def skip():
            return made(begun)

        def again():
            return made(read_open(weights, begun, begun.tokens, begun.length)[0])

        after = jax.lax.cond(jnp.any(rows & (state.length > 0)), again, skip)
        return mechanisms.replace_rows(made(state), after, rows)

    # Pool and store stay outside of the branch, as they may be on the host.
    parts = jax.lax.cond(jnp.any(rows), make, lambda: made(state))
    cache, queries, num_queries = parts
    return state._replace(
        cache=cache,
        queries=queries,
        num_queries=num_queries,
        cache_ready=state.cache_ready | rows,
    )


def _before_tokens(weights, state):
    """A cache of [bos ; rows that the last queries retrieve ; pool], without tokens.

    Rows that attention retrieves are not cached, but take RoPE positions.
    """
    c, blocks = weights.config, weights.blocks(writes=False)
    batch = state.num_valid.shape[0]
    pool = valid_rows(state.num_valid, c.pool_size)
    cache = empty(weights, batch, c.prefix, c.prefix + c.chunk_size)
    retrieved = _retrieved(attention_retrieval.of_store(weights, state.store))
    keys, values, seen = [], [], pool
    for layer, block in enumerate(blocks):
        memory = [(short_term_pool.of_layer(state.pool, layer), pool)]
        if c.has_retriever:
            num_queries = _first(state.num_queries, c.chunk_size)
            found = long_term_store.retrieve(
                c, state.store, layer, state.queries[:, layer], num_queries
            )
            memory.insert(0, (found.rows, found.real))
        rows, seen = with_bos(weights, layer, memory)
        made = prefix_slots(weights.backbone.config, block, rows, seen, retrieved)
        keys.append(_put(cache.keys[layer], made.keys))
        values.append(_put(cache.values[layer], made.values))
    return cache._replace(
        keys=tuple(keys),
        values=tuple(values),
        visible=cache.visible.at[:, : c.prefix].set(seen),
        offset=_count(seen, retrieved),
    )


def read_piece(
    weights: MPlusWeights,
    state: MPlusState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
) -> tuple[MPlusState, Float[Array, "B T D"]]:
    """Reads the next `lengths[b]` tokens of the open chunk; returns their features."""
    return read_open(weights, prepare(weights, state, lengths > 0), tokens, lengths)


def read_open(
    weights: MPlusWeights,
    state: MPlusState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
) -> tuple[MPlusState, Float[Array, "B T D"]]:
    """`read_piece` for a cache that is ready; stores the tokens' queries."""
    h = weights.backbone.embed(tokens)
    before = state.cache.length
    attention_retriever = attention_retrieval.of_store(weights, state.store)
    cache, y, inputs = read_tokens(
        weights, state.cache, h, lengths, attention_retriever=attention_retriever
    )
    state = state._replace(cache=cache)
    if state.queries is None:
        return state, y
    # Queries of the chunk before stay behind those of the open one until these replace
    # them, so that a new chunk has some to retrieve with.
    num_queries = jnp.maximum(state.num_queries, cache.length)
    new = jnp.stack(
        [weights.retriever_queries(i, x) for i, x in enumerate(inputs)], axis=1
    )
    times = jnp.arange(h.shape[1], dtype=jnp.int32)[None]
    places = jnp.where(
        times < lengths[:, None], before[:, None] + times, weights.config.chunk_size
    )
    write = jax.vmap(lambda old, new, at: old.at[:, at].set(new, mode="drop"))
    return state._replace(
        num_queries=num_queries, queries=write(state.queries, new, places)
    ), y
