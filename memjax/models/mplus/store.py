"""M+'s long-term store: rows that the pool dropped, and their retrieval.

A layer's store is a buffer of M rows, of which the first `num_valid` hold something.
There are two rules for which rows to evict:

- "oldest": the store keeps the M youngest of all rows it was given.
- "frequency", as the published program: dropped rows are pending at the end of the
  buffer, where they can already be retrieved. Every `merge_every` updates they are
  merged with recall frequency `recalls`. Then all frequencies lose `decay`, and rows
  whose frequency is used up are evicted, unless fewer than R + 1 rows would remain.

Wang et al. (2025), https://arxiv.org/abs/2502.00592, section 3.2.

Shapes: B batch, M capacity, K rows of an update, R retrieved rows, D model,
d keys, T queries.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from memjax import mechanisms
from memjax.models import ragged
from memjax.models.mplus.config import LEAST_RECALLS, MPlusConfig
from memjax.models.mplus.state import LayerStore, Store
from memjax.models.offload import near, put
from memjax_kernels import sigmoid_scores
from memjax_kernels._src.common.partition import along_batch


class Retrieved(NamedTuple):
    """The rows of one layer that a read retrieves, oldest first.

    Attributes:
        rows: the memory tokens; 0 where not `real`.
        chosen: their indices in the store.
        real: False where the store has fewer than R rows; these come first.
        scores: the retriever's p of every row of the store, -inf where there is none.
    """

    rows: Float[Array, "R D"]
    chosen: Int[Array, " R"]
    real: Bool[Array, " R"]
    scores: Float[Array, " M"]


def empty(
    config: MPlusConfig, batch: int, layers: int, width: int, dtype: str = "float32"
) -> Store:
    """A store without rows.

    With retrieval="attention" keys are as wide as their rows, D.
    """
    shape = (batch, config.store_size)
    key_dim = width if config.by_attention else config.key_dim

    def layer():
        return LayerStore(
            rows=put(config.store_memory, jnp.zeros((*shape, width), dtype)),
            keys=jnp.zeros((*shape, key_dim), jnp.float32),
            born=jnp.zeros(shape, jnp.int32),
        )

    return Store(
        layers=tuple(layer() for _ in range(layers)),
        recalls=jnp.zeros(shape, jnp.float32),
        num_valid=jnp.zeros(batch, jnp.int32),
        num_pending=jnp.zeros(batch, jnp.int32),
    )


def append(
    config: MPlusConfig,
    store: Store,
    new: tuple[LayerStore, ...],
    mask: Bool[Array, " B"],
) -> Store:
    """Stores K dropped rows per layer, for the batch elements in `mask`."""
    count = new[0].born.shape[1]
    free = store.num_valid[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    full = mask & (store.num_valid + count > config.store_size)
    layers = []
    for old, rows in zip(store.layers, new, strict=True):
        places = free
        if not config.by_frequency:
            oldest = functools.partial(
                _oldest_places, store.num_valid, old.born, rows.born
            )
            # Searching for the oldest rows is the costly part, and needed in a full
            # store alone.
            places = jax.lax.cond(
                jnp.any(full), oldest, lambda free, _: free, free, full
            )
        # Indices beyond the buffer are not written.
        layers.append((old, rows, jnp.where(mask[:, None], places, config.store_size)))
    # All layers drop as many rows, so that one count serves them.
    more = jnp.where(mask, jnp.int32(count), 0)
    places = jnp.where(mask[:, None], free, config.store_size)
    # A row that is new to the store has never been recalled, and gets the start value.
    recalls = jnp.full(free.shape, config.recalls, jnp.float32)
    store = Store(
        layers=(),
        recalls=_written(store.recalls, recalls, places),
        num_valid=jnp.minimum(store.num_valid + more, config.store_size),
        num_pending=store.num_pending + more
        if config.by_frequency
        else store.num_pending,
    )
    if not config.by_frequency:
        return store._replace(layers=_each_layer(_written, layers))
    due = store.num_pending >= config.merge_every * count

    def merged():
        # One function writes and moves, so that memory on the host is written once.
        small, order = _merge(config, store, due)

        def moved(*args):
            return ragged.take(_written(*args[:3]), args[3])

        moves = [(*layer, order) for layer in layers]
        return small._replace(layers=_each_layer(moved, moves))

    def plain():
        return store._replace(layers=_each_layer(_written, layers))

    return jax.lax.cond(jnp.any(due), merged, plain)


def _written(buffer, rows, at):
    return ragged.write(buffer, at, rows)


def _each_layer(function, layers):
    """Applies function(buffer, new, *rest) to every buffer, in its own memory."""
    here = functools.partial(near, function, stays=True)
    return tuple(
        jax.tree.map(lambda old, new, rest=rest: here(old, new, *rest), old, new)
        for old, new, *rest in layers
    )


def _merge(config, store, mask):
    """Merges pending rows and evicts others; also returns the rows' new order."""
    left = store.recalls - config.decay
    places = jnp.arange(config.store_size, dtype=jnp.int32)[None]
    filled = places < store.num_valid[:, None]
    alive = filled & (left > LEAST_RECALLS)
    count = alive.sum(axis=1, dtype=jnp.int32)
    # The program's rule: it evicts nothing if R rows or fewer would remain.
    enough = count > config.num_retrieved
    stays = jnp.where(enough[:, None], alive, filled)
    stays = stays | ~mask[:, None]
    # Stable, so that the rows that stay keep their order.
    order = jnp.argsort(~stays, axis=1, stable=True).astype(jnp.int32)
    merged = store._replace(
        recalls=ragged.take(jnp.where(enough[:, None], left, store.recalls), order),
        num_valid=jnp.where(enough, count, store.num_valid),
        num_pending=jnp.zeros_like(store.num_pending),
    )
    return mechanisms.replace_rows(store, merged, mask), order


def retrieve(
    config: MPlusConfig,
    store: Store,
    layer: int,
    queries: Float[Array, "B T d"],
    query_mask: Bool[Array, "B T"],
) -> Retrieved:
    """Retrieves the R rows of a layer with the highest p, oldest first.

    Among rows of equal p the first in the store win; rows of equal age are as
    `MPlusConfig.equal_ages` says. Nothing is real for a batch element without queries.

    Returns:
        `Retrieved`, with the batch first.
    """
    rows, keys, born = store.layers[layer]
    asked = jnp.any(query_mask, axis=1)
    # Without a gradient: the retriever learns from its own loss.
    found = sigmoid_scores(queries, query_mask, keys)
    chosen, real, scores = jax.vmap(functools.partial(_choose, config))(
        found, born, store.num_valid, store.num_pending, asked
    )
    # Unused parts of the buffer may hold anything, and must not give NaN.
    # Stored rows are divided by width; retrieved ones are whole.
    taken = along_batch(near(ragged.take, rows, chosen))
    found = jnp.where(real[..., None], taken, 0.0)
    return Retrieved(found, chosen, real, scores)


def _choose(config, found, born, num_valid, num_pending, asked):
    places = jnp.arange(config.store_size, dtype=jnp.int32)
    scores = jnp.where((places < num_valid) & asked, found, -jnp.inf)
    best, chosen = jax.lax.top_k(scores, config.num_retrieved)
    real = best > -jnp.inf
    if config.legacy:
        # With fewer than R merged rows there is no search: they are repeated.
        # The program searches the merged rows only if there are at least R of them.
        merged = num_valid - num_pending
        turns = jnp.arange(config.num_retrieved, dtype=jnp.int32) - config.num_retrieved
        tiled = turns % jnp.maximum(merged, 1)
        few = merged < config.num_retrieved
        real = jnp.where(few, merged > 0, real)
        chosen = jnp.where(few, tiled, jnp.sort(chosen))
    ranks = chosen
    if config.falling:
        # With `legacy` by the place in `chosen`, which tells repeated rows apart.
        ranks = -jnp.arange(config.num_retrieved) if config.legacy else -chosen
    order = oldest_first(born[chosen], ranks, real)
    return chosen[order], real[order], scores


def oldest_first(
    born: Int[Array, "*E R"], ranks: Int[Array, "*E R"], real: Bool[Array, "*E R"]
) -> Int[Array, "*E R"]:
    """The order of rows by birth, then by rank; those that are not real come first.

    Args:
        born: of each row, on the clock that runs around.
        ranks: of each row, all different.
        real: of each row; the first is real if any is.
    """
    # A difference has the right sign where the clock ran around between two births.
    return jnp.lexsort((ranks, born - born[..., :1], real))


def _oldest_places(num_valid, born, new, free, full):
    """Where K new rows go: at `free`, in a full buffer the j-th youngest over the
    j-th oldest.

    A row that is not younger than the one it would replace is not stored.
    """
    places = jnp.arange(born.shape[1], dtype=jnp.int32)

    def one(num_valid, born, new, free, full):
        # Differences, because the clock runs around.
        born, new = born - new[0], new - new[0]
        # top_k of float32 is 30 times as fast as of integers on a CPU. Ages are exact
        # up to 2**24, which a store of eight million rows does not reach.
        now = jnp.maximum(new.max(), jnp.where(places < num_valid, born, 0).max())
        ages = jnp.where(places < num_valid, (now - born).astype(jnp.float32), jnp.inf)
        oldest, at = jax.lax.top_k(ages, new.shape[0])
        # The youngest row replaces the oldest, as long as it is younger.
        youngest = jnp.argsort(-new)
        younger = (now - new[youngest]).astype(jnp.float32) < oldest
        at = jnp.where(younger, at, places.shape[0])
        return jnp.where(full, jnp.zeros_like(at).at[youngest].set(at), free)

    return jax.vmap(one)(num_valid, born, new, free, full)
