"""Conversion between columns of numbers and all lanes of a head.

Columns are in the order of `blocks.gate_columns`; more of them, such as flags, are left
out. P is rows * group packs.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import packs

F32 = jnp.float32


def spread(
    columns: Float[Array, "rows C R"], width: int, group: int, heads: int
) -> Float[Array, "P C DD"]:
    """Each head's column in all of the head's lanes."""
    size = columns.shape[1]
    packs_of = [
        packs.by_head(
            [
                jnp.broadcast_to(row[:, i : i + 1], (size, width))
                for i in range(pack, group * heads, group)
            ]
        )
        for row in columns
        for pack in range(group)
    ]
    return jnp.stack(packs_of)


def sum_lanes(
    x: Float[Array, "P C DD"], shape: tuple[int, int, int], group: int, heads: int
) -> Float[Array, "rows C R"]:
    """Sums over each head's lanes, as columns of this shape; undoes `spread`."""
    rows, size, number = shape
    by_head = packs.sums(x, heads)
    lane = packs.lane((size, number))
    found = []
    for row in range(rows):
        columns = jnp.zeros((size, number), F32)
        for i in range(group * heads):
            numbers = by_head[i // group][row * group + i % group]
            columns = jnp.where(lane == i, numbers, columns)
        found.append(columns)
    return jnp.stack(found)
