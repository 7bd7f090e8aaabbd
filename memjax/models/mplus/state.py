"""State of M+, and the initial memory of a checkpoint.

Memory tokens and the KV cache have the number format `MPlusConfig.memory_dtype`.

Shapes: B batch, L layers, K memory tokens of a chunk, N rows of the pool, M capacity of
the store, R retrieved rows, C longest chunk, D model, d width of the retriever's keys,
S positions of the KV cache, G key heads, H width of a head. With retrieval="attention"
the store's D and d are both G * H.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from memjax.models.adapters import Frozen
from memjax.models.offload import near


class LayerStore(NamedTuple):
    """The rows that one layer's pool has dropped.

    Attributes:
        rows: the memory tokens; with retrieval="attention" their attention values. The
            first `Store.num_valid` rows hold something.
        keys: retriever keys, or attention keys, computed when the row was dropped.
        born: the clock when the row was made, so that its age is clock - born. With
            `legacy` it is clock - age at the drop.
    """

    rows: Float[Array, "B M D"]
    keys: Float[Array, "B M d"]
    born: Int[Array, "B M"]


class Store(NamedTuple):
    """The long-term store; all layers hold the same number of rows.

    Attributes:
        layers: the rows of each layer.
        recalls: recall frequencies, used by eviction="frequency".
        num_valid: number of rows, the pending ones last.
        num_pending: number of rows that are not merged yet; they are searched too.
    """

    layers: tuple[LayerStore, ...]
    recalls: Float[Array, "B M"]
    num_valid: Int[Array, " B"]
    num_pending: Int[Array, " B"]


class KVCache(NamedTuple):
    """Attention keys and values of [bos, retrieved rows, pool, tokens] in each layer.

    A slot is one row of the J = G H channels of all heads, as in attention's cache.

    Attributes:
        keys: after RoPE.
        values: at the same positions.
        visible: False where there is nothing: empty memory, or no token yet.
        prefix_length: positions before the first token.
        length: number of tokens in the cache.
        offset: RoPE position of the first token: the number of visible positions
            before it.
    """

    keys: tuple[Float[Array, "B S J"], ...]
    values: tuple[Float[Array, "B S J"], ...]
    visible: Bool[Array, "B S"]
    prefix_length: Int[Array, " B"]
    length: Int[Array, " B"]
    offset: Int[Array, " B"]


class MPlusState(NamedTuple):
    """The memory of every batch element, and its open chunk.

    The open chunk holds the tokens that are not compressed yet.

    Attributes:
        pool: short-term memory, hidden states of each layer. The last `num_valid` rows
            hold something, oldest first.
        ages: of the pool's rows, counted in memory tokens.
        num_valid: number of rows in the pool, the same in all layers.
        clock: number of memory tokens made so far: K per update. It runs around, from
            2**31 - 1 to -2**31; ages are differences, and right up to 2**31.
        store: None without long-term memory.
        tokens: of the open chunk; 0 from `length` on.
        length: number of tokens in the open chunk, in [0, C).
        queries: retriever queries of the last C tokens read, by position in their
            chunk. None without a learned retriever.
        num_queries: number of valid queries.
        cache: KV cache of the open chunk.
        cache_ready: False if the next read has to compute `cache` again.
        key: of the batch element's random numbers.
    """

    pool: Float[Array, "B L N D"]
    ages: Int[Array, "B L N"]
    num_valid: Int[Array, " B"]
    clock: Int[Array, " B"]
    store: Store | None
    tokens: Int[Array, "B C"]
    length: Int[Array, " B"]
    queries: Float[Array, "B L C d"] | None
    num_queries: Int[Array, " B"]
    cache: KVCache
    cache_ready: Bool[Array, " B"]
    key: UInt32[Array, "B 2"]


class Initial(NamedTuple):
    """The memory that a checkpoint brings, from which every sequence starts.

    Attributes:
        pool: [L, N, D], short-term memory, of age 0.
        rows: [L, n, D] of the long-term store, n in [1, M]. None, as the next three,
            where the checkpoint has no store.
        keys: [L, n, d], keys of these rows.
        born: [L, n], minus the ages of these rows.
        recalls: [n], recall frequencies of these rows.
    """

    pool: Frozen
    rows: Frozen | None = None
    keys: Frozen | None = None
    born: Frozen | None = None
    recalls: Frozen | None = None

    def fill(self, state: MPlusState) -> MPlusState:
        """The empty state with this memory in every batch element."""
        batch, pool = state.num_valid.shape[0], self.pool.get_value()

        def each(x):
            return jnp.broadcast_to(x[None], (batch, *x.shape))

        state = state._replace(
            pool=near(_start, state.pool, each(pool), stays=True),
            # A checkpoint's pool is full, so that the first update drops into the
            # store.
            num_valid=jnp.full_like(state.num_valid, pool.shape[1]),
        )
        parts = (self.rows, self.keys, self.born, self.recalls)
        if state.store is None or self.recalls is None:
            return state
        *parts, recalls = (part.get_value() for part in parts if part is not None)
        count = recalls.shape[0]

        # The first rows of the buffer: what follows is unused.
        def start(buffer, start):
            return buffer.at[:, :count].set(start[None].astype(buffer.dtype))

        begin = functools.partial(near, start, stays=True)
        layers = tuple(
            jax.tree.map(begin, layer, LayerStore(*(part[i] for part in parts)))
            for i, layer in enumerate(state.store.layers)
        )
        store = state.store._replace(
            layers=layers,
            recalls=begin(state.store.recalls, recalls),
            num_valid=jnp.full_like(state.num_valid, count),
        )
        return state._replace(store=store)


def _start(pool, start):
    return start.astype(pool.dtype)
