"""Writing of M+: compress chunks to memory tokens, for pool and store.

Shapes: B batch, L layers, T time, K memory tokens of a chunk, C longest chunk, D model.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from memjax import mechanisms
from memjax.models import ragged
from memjax.models.mplus import attention_retrieval, kv_cache
from memjax.models.mplus import layers as mplus_layers
from memjax.models.mplus import pool as short_term_pool
from memjax.models.mplus import store as long_term_store
from memjax.models.mplus.state import LayerStore, MPlusState
from memjax.models.mplus.weights import MPlusWeights
from memjax.models.offload import near, put
from memjax_kernels._src.common.partition import along_batch


def empty_state(weights: MPlusWeights, batch: int, key: PRNGKeyArray) -> MPlusState:
    """Empty memory; each batch element has random numbers of its own."""
    c, d = weights.config, weights.width
    # A key for each batch element: what one pool drops does not depend on the others.
    rows = jnp.arange(batch, dtype=jnp.int32)
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)
    zeros = functools.partial(jnp.zeros, dtype=jnp.int32)
    shape = (batch, weights.layers, c.pool_size, d)
    state = MPlusState(
        pool=put(c.pool_memory, jnp.zeros(shape, weights.memory_dtype)),
        ages=zeros((batch, weights.layers, c.pool_size)),
        num_valid=zeros(batch),
        clock=zeros(batch),
        store=None,
        tokens=zeros((batch, c.chunk_size)),
        length=zeros(batch),
        queries=None,
        num_queries=zeros(batch),
        cache=kv_cache.empty(weights, batch, c.prefix, c.prefix + c.chunk_size),
        cache_ready=jnp.zeros(batch, bool),
        key=jax.random.key_data(keys),
    )
    if c.num_retrieved:
        width = attention_retrieval.width(weights.backbone.config)
        width = width if c.by_attention else d
        store = long_term_store.empty(
            c, batch, weights.layers, width, weights.memory_dtype
        )
        state = state._replace(store=store)
    if c.has_retriever:
        shape = (batch, weights.layers, c.chunk_size, c.key_dim)
        state = state._replace(queries=jnp.zeros(shape, jnp.float32))
    return state


def by_chunks(
    weights: MPlusWeights,
    state: MPlusState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"] | None,
    read: Callable,
) -> tuple[MPlusState, Any]:
    """Fills the open chunks with tokens, and writes each one that is full.

    Batch elements fill their chunks independently, as their lengths may differ.

    Args:
        weights: of M+.
        state: the memory so far.
        tokens: T >= 1.
        lengths: how many of them are a batch element's, 0 to T; None is T for all.
        read: (weights, state, tokens, lengths) -> (state, features), of the first
            `lengths[b]` of the tokens given, before they join the open chunk.

    Returns:
        The state, and what `read` returned for each token.
    """
    c, (b, t) = weights.config.chunk_size, tokens.shape
    width, before = min(c, t), state.length
    total = jnp.full(b, t, jnp.int32) if lengths is None else lengths.astype(jnp.int32)

    # Compiled by itself, it is traced once for its shapes and for its use.
    @jax.jit
    def step(carry, _):
        state, done = carry
        lengths = jnp.minimum(c - state.length, total - done)
        at = done[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
        # Positions beyond T are clamped; `lengths` says that they are no tokens.
        part = ragged.take(tokens, jnp.minimum(at, t - 1))
        state, y = read(weights, state, part, lengths)
        state = _keep_tokens(state, part, lengths)
        return (write_open(weights, state, state.length == c), done + lengths), y

    # An open chunk holds up to C - 1 tokens, which may push T tokens into one chunk
    # more.
    count = -(-(c - 1 + t) // c)
    carry = (state, jnp.zeros(b, jnp.int32))
    if count == 1:
        (state, _), ys = step(carry, None)
        return state, ys
    empty = jax.eval_shape(step, carry, None)[1]

    def skip(carry, _):
        return (carry, jax.tree.map(jnp.zeros_like, empty))

    # Whether the last iteration has tokens depends on the lengths of the open chunks.
    def some(carry, _):
        return jax.lax.cond(jnp.any(carry[1] < total), step, skip, carry, None)

    (state, _), ys = jax.lax.scan(some, carry, length=count)
    if ys is None:
        return state, None
    # Token t was read in the iteration that read its chunk.
    times = jnp.arange(t, dtype=jnp.int32)[None]
    rounds = (before[:, None] + times) // c
    first = jnp.where(rounds == 0, 0, rounds * c - before[:, None])
    flat = jnp.moveaxis(ys, 0, 1).reshape(b, count * width, -1)
    return state, ragged.take(flat, rounds * width + times - first)


def inject(
    weights: MPlusWeights,
    state: MPlusState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"] | None,
) -> MPlusState:
    """Writes tokens without reading them; see `MPlus.inject`."""
    some = True if lengths is None else lengths > 0
    # The cache lacks the tokens of the open chunk that come now and are not read.
    state = state._replace(cache_ready=state.cache_ready & jnp.logical_not(some))

    # Nothing is read here: only compression changes the memory.
    def skip(weights, state, piece, lengths):
        return (state, None)

    return by_chunks(weights, state, tokens, lengths, skip)[0]


def write_open(
    weights: MPlusWeights, state: MPlusState, rows: Bool[Array, " B"]
) -> MPlusState:
    """Compresses and stores the open chunks of the batch elements in `rows`."""

    def write(state):
        # `compress` needs a token. Empty chunks are compressed for nothing: `rows`
        # leaves them out.
        lengths = jnp.maximum(state.length, 1)
        new, given = _compress(weights, state, state.tokens, lengths, None)
        # Tokens that were not read have no queries, and the next chunk needs some.
        state = _keep_queries(weights, state, given, rows & ~state.cache_ready)
        state = update(weights, state, new, None, rows)
        return state._replace(
            tokens=jnp.where(rows[:, None], 0, state.tokens),
            length=jnp.where(rows, 0, state.length),
        )

    return jax.lax.cond(jnp.any(rows), write, lambda state: state, state)


def compress(
    weights: MPlusWeights,
    state: MPlusState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"] | None,
    memory: Float[Array, "B L K D"] | None,
) -> Float[Array, "B L K D"]:
    """Memory tokens of the first `lengths[b]` tokens; see `MPlus.compress`."""
    return _compress(weights, state, tokens, lengths, memory)[0]


def _compress(weights, state, tokens, lengths, memory):
    """Memory tokens, and each layer's inputs for the chunk's tokens."""
    real = (
        jnp.ones_like(state.num_valid, bool)
        if memory is not None
        else state.num_valid > 0
    )

    # The pool fills K rows at a time, so that its newest K rows are all there or none
    # is.
    def newest(pool):
        return pool[:, :, -weights.config.num_memory_tokens :]

    seen = along_batch(near(newest, state.pool)) if memory is None else memory
    return mplus_layers.compress(
        weights.backbone.config,
        weights.blocks(writes=True),
        weights.bos,
        weights.position,
        seen,
        real,
        weights.backbone.embed(tokens),
        lengths,
        weights.config.stored == "input",
    )


def _keep_queries(weights, state, given, rows):
    """The open chunk's queries from its compression, for the batch elements in `rows`.

    Those of a read come from other hidden states: with all memory, by the other
    adapter.
    """
    if state.queries is None:
        return state
    new = [weights.retriever_queries(i, x) for i, x in enumerate(given)]
    times = jnp.arange(weights.config.chunk_size, dtype=jnp.int32)[None]
    taken = rows[:, None] & (times < state.length[:, None])
    taken = taken[:, None, :, None]
    count = jnp.maximum(state.num_queries, state.length)
    return state._replace(
        queries=jnp.where(taken, jnp.stack(new, axis=1), state.queries),
        num_queries=jnp.where(rows, count, state.num_queries),
    )


def check_compress(
    weights: MPlusWeights,
    tokens: Int[Array, "B T"],
    memory: Float[Array, "B L K D"] | None,
) -> None:
    """Raises ValueError on what `MPlus.compress` refuses of these arguments."""
    c = weights.config
    if tokens.shape[1] > c.chunk_size:
        raise ValueError(
            f"tokens must be at most chunk_size={c.chunk_size} a batch element, "
            f"got {tokens.shape[1]}"
        )
    if memory is not None:
        batch = tokens.shape[0]
        weights.check_rows("memory", memory, batch, c.num_memory_tokens)


def check_update(
    weights: MPlusWeights,
    state: MPlusState,
    new: Float[Array, "B L K D"],
    dropped: Int[Array, "B L K"] | None,
) -> None:
    """Raises ValueError on what `MPlus.update` refuses."""
    c = weights.config
    weights.check_rows("new", new, state.num_valid.shape[0], c.num_memory_tokens)
    if dropped is not None and dropped.shape != new.shape[:3]:
        raise ValueError(
            f"dropped must be [B, L, K] = {list(new.shape[:3])}, "
            f"got {list(dropped.shape)}"
        )
    if dropped is not None:
        short_term_pool.check_rows("dropped", dropped, c.pool_size)


def update(
    weights: MPlusWeights,
    state: MPlusState,
    new: Float[Array, "B L K D"],
    dropped: Int[Array, "B L K"] | None,
    rows: Bool[Array, " B"],
) -> MPlusState:
    """Stores memory tokens of the batch elements in `rows`; see `MPlus.update`."""
    c = weights.config
    # One key draws what is dropped, the other is the next state's.
    keys = jax.vmap(jax.random.split)(jax.random.wrap_key_data(state.key))
    if dropped is None:

        def draw(key):
            return short_term_pool.draw_dropped(
                key, weights.layers, c.pool_size, c.num_memory_tokens
            )

        dropped = jax.vmap(draw)(keys[:, 1])
    pool, ages, out = short_term_pool.replace(
        state.pool,
        state.ages,
        state.num_valid,
        new,
        dropped,
        rows,
        # In the program ages count from the drop: rows do not age in the pool.
        advance=not c.legacy,
    )
    # Until then an update drops empty rows, which the store must not get.
    was_full = state.num_valid == c.pool_size
    after = state._replace(
        ages=ages,
        num_valid=jnp.minimum(state.num_valid + c.num_memory_tokens, c.pool_size),
        clock=state.clock + c.num_memory_tokens,
        key=jax.random.key_data(keys[:, 0]),
        # The cache was computed from the pool before the update.
        cache_ready=jnp.zeros_like(state.cache_ready),
    )

    # Pool and store are large: they select by `rows` themselves, as they are written.
    def small(state):
        return state._replace(pool=None, store=None)

    after = mechanisms.replace_rows(small(state), small(after), rows)
    store = state.store
    if store is not None:
        born = after.clock[:, None, None] - out.ages
        parts = [(i, out.rows[:, i], born[:, i]) for i in range(weights.layers)]
        news = tuple(stored(weights, *part) for part in parts)
        store = long_term_store.append(c, store, news, rows & was_full)
    return after._replace(pool=pool, store=store)


def stored(
    weights: MPlusWeights,
    layer: int,
    rows: Float[Array, "B K D"],
    born: Int[Array, "B K"],
) -> LayerStore:
    """The store's entry for memory tokens that a layer's pool drops."""
    if weights.config.by_attention:
        block = weights.blocks(writes=False)[layer]
        kept = attention_retrieval.stored(weights.backbone.config, block, rows, born)
        return kept._replace(rows=kept.rows.astype(weights.memory_dtype))
    # Keys are computed once, at the drop, and not again in every search.
    return LayerStore(rows, weights.retriever_keys(layer, rows), born)


def _keep_tokens(state, tokens, lengths):
    """Appends the first `lengths[b]` tokens to the open chunk."""
    times = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    at = state.length[:, None] + times
    # A position beyond the chunk is not written.
    at = jnp.where(times < lengths[:, None], at, state.tokens.shape[1])
    return state._replace(
        tokens=ragged.write(state.tokens, at, tokens.astype(jnp.int32)),
        length=state.length + lengths,
    )
