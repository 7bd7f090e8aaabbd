"""One memory for several query heads, as grouped-query attention shares keys.

The heads of a group write the same token and read the same memory with queries of their
own. It has the bytes of one head and the work of all: the queries of a group become
batch elements, each with a copy of the memory that it reads.

Shapes: B batch, T time, H query heads, G memories, N = H / G queries of each, K key,
V value.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from memjax.mechanisms.cells.base import Cell


def grouped_queries(cell: Cell, queries: int) -> Cell:
    """The same cell with `queries` query heads for each memory head.

    Args:
        cell: of G heads, whose q and k come with unit norm.
        queries: N; query heads h N to h N + N - 1 read memory h.
    """
    if queries == 1:
        return cell
    return cell._replace(
        step=functools.partial(_shared, cell.step, queries),
        apply=functools.partial(_shared, cell.apply, queries),
    )


def _shared(
    call,
    queries: int,
    params: PyTree,
    memory: PyTree,
    q: Float[Array, "B *T H K"],
    k: Float[Array, "B *T G K"],
    v: Float[Array, "B *T G V"],
    x: Float[Array, "B *T D"],
) -> tuple[PyTree, Float[Array, "B *T H V"]]:
    memory, k, v, x = copies((memory, k, v, x), queries)
    memory, y = call(params, memory, to_batch(q, queries), k, v, x)
    return first_copy(memory, queries), to_heads(y, queries)


def copies(tree: PyTree, queries: int) -> PyTree:
    """Arrays [B, ...] as [B N, ...], a copy for each head of a group."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, queries, axis=0), tree)


def first_copy(memory: PyTree, queries: int) -> PyTree:
    """Inverse of `copies`, for equal copies."""

    # Not every N-th, which devices that share the batch might have to exchange.
    def first(leaf):
        return leaf.reshape(-1, queries, *leaf.shape[1:])[:, 0]

    return jax.tree.map(first, memory)


def to_batch(q: Float[Array, "B *T H K"], queries: int) -> Float[Array, "BN *T G K"]:
    """Queries [B, ..., G N, K] as [B N, ..., G, K]: each has a copy of its memory."""
    batch, *times, heads, width = q.shape
    apart = q.reshape(batch, *times, heads // queries, queries, width)
    return jnp.moveaxis(apart, -2, 1).reshape(
        batch * queries, *times, heads // queries, width
    )


def to_heads(y: Float[Array, "BN *T G V"], queries: int) -> Float[Array, "B *T H V"]:
    """Undoes `to_batch`: reads [B N, ..., G, V] as [B, ..., G N, V]."""
    rows, *times, heads, width = y.shape
    apart = y.reshape(rows // queries, queries, *times, heads, width)
    return jnp.moveaxis(apart, 1, -2).reshape(
        rows // queries, *times, heads * queries, width
    )
