"""The memory that M+ carries: pool, long-term store, open chunk and its KV cache.

Shapes: B batch, L layers, K memory tokens of a chunk, N rows of the pool, M capacity of
the store, R retrieved rows, C open chunk, D model, d retriever's keys, S slots of a
cache, G key heads, H width of a head. With retrieval "attention" the store's D and d
are both G * H.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from memjax.models.lora import Frozen
from memjax.models.offload import near


class LayerStore(NamedTuple):
    """One layer's rows that the pool dropped.

    Attributes:
        rows: the memory tokens, with retrieval "attention" their values; the first
            `Store.num_valid` are filled.
        keys: of the retriever, or of the layer's attention, made when the row was
            dropped.
        born: the clock when the row was made (with `legacy`, what its age at the drop
            says): its age is clock - born.
    """

    rows: Float[Array, "B M D"]
    keys: Float[Array, "B M d"]
    born: Int[Array, "B M"]


class Store(NamedTuple):
    """The long-term store; every layer holds as many rows.

    Attributes:
        layers: their rows.
        recalls: recall frequency, for eviction by it.
        num_valid: filled rows, those of the drop cache last.
        num_pending: rows in the drop cache, which is searched as well.
    """

    layers: tuple[LayerStore, ...]
    recalls: Float[Array, "B M"]
    num_valid: Int[Array, " B"]
    num_pending: Int[Array, " B"]


class KVCache(NamedTuple):
    """Keys and values of [bos, retrieved rows, pool, tokens], layer by layer.

    Attributes:
        keys: with RoPE.
        values: of the same slots.
        visible: False in slots that nobody may see: empty memory, no token yet.
        prefix_length: slot of the first token.
        length: tokens so far.
        offset: RoPE position of the first token, the number of visible slots before.
    """

    keys: tuple[Float[Array, "B S G H"], ...]
    values: tuple[Float[Array, "B S G H"], ...]
    visible: Bool[Array, "B S"]
    prefix_length: Int[Array, " B"]
    length: Int[Array, " B"]
    offset: Int[Array, " B"]


class MPlusState(NamedTuple):
    """The memory of every row of the batch.

    Attributes:
        pool: short-term memory, vectors of the residual stream; the last `num_valid`
            rows of a layer are filled, oldest first.
        ages: of the pool's rows, in memory tokens.
        num_valid: filled rows of the pool, the same in all layers.
        clock: memory tokens made so far: K an update.
        store: None without long-term memory.
        tokens: the open chunk, 0 from `length` on.
        length: tokens in it, in [0, C).
        queries: the retriever's, of the tokens that were read last: token i of a chunk
            is in place i. None without a retriever.
        num_queries: how many of them there are.
        cache: of the open chunk.
        cache_ready: whether `cache` is up to date; if not, the next read makes it anew.
        key: of the row's random numbers.
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
    """Memory of a checkpoint, from which every text starts.

    Attributes:
        pool: [L, N, D], short-term memory, of age 0.
        rows: [L, n, D] of the long-term store, n in [1, M]; none where the checkpoint
            has none.
        keys: [L, n, d], theirs.
        born: [L, n], minus their ages.
        recalls: [n], their recall frequency.
    """

    pool: Frozen
    rows: Frozen | None = None
    keys: Frozen | None = None
    born: Frozen | None = None
    recalls: Frozen | None = None

    def fill(self, state: MPlusState) -> MPlusState:
        """An empty state with this memory in every row."""
        batch, pool = state.num_valid.shape[0], self.pool.get_value()
        each = lambda x: jnp.broadcast_to(x[None], (batch, *x.shape))
        state = state._replace(
            pool=near(lambda _, start: start, state.pool, each(pool), stays=True),
            num_valid=jnp.full_like(state.num_valid, pool.shape[1]),
        )
        parts = (self.rows, self.keys, self.born, self.recalls)
        if state.store is None or self.recalls is None:
            return state
        *parts, recalls = (part.get_value() for part in parts if part is not None)
        count = recalls.shape[0]
        start = lambda buffer, start: buffer.at[:, :count].set(start[None])
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
