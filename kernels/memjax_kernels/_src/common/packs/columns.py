"""Conversion between columns of numbers and all lanes of a head.

Columns are in the order of `blocks.gate_columns`; more of them, such as flags, are left
out. P is rows * group packs.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import packs

F32 = jnp.float32


def spread(
    columns: Float[Array, "rows C R"], width: int, group: int, heads: int
) -> Float[Array, "P C DD"]:
    """Each head's column in all of the head's lanes: a product with ones."""
    rows, size, number = columns.shape
    ones = _of_heads((number, group * width), 0, width, (group, heads))
    wide = _choose(columns.reshape(rows * size, number), ones)
    wide = wide.reshape(rows, size, -1)
    parts = [wide[..., i * width : (i + 1) * width] for i in range(group)]
    return jnp.stack(parts, axis=1).reshape(-1, size, width)


def sum_lanes(
    x: Float[Array, "P C DD"], shape: tuple[int, int, int], group: int, heads: int
) -> Float[Array, "rows C R"]:
    """Sums over each head's lanes, as columns of this shape; undoes `spread`."""
    rows, size, number = shape
    width = x.shape[-1]
    ones = _of_heads((group * width, number), 1, width, (group, heads))
    by_row = [
        jnp.concatenate([*x[i * group : (i + 1) * group]], axis=-1) for i in range(rows)
    ]
    return _choose(jnp.concatenate(by_row), ones).reshape(rows, size, number)


def _choose(x: Array, ones: Array) -> Array:
    """A product with zeros and ones."""
    return packs.in_parts(
        lambda part: jax.lax.dot(part, ones, preferred_element_type=F32), x
    )


def _of_heads(shape, axis: int, width: int, packing: tuple[int, int]):
    """1 where a column along `axis` is that of a lane's head, [., .]."""
    group, heads = packing
    column = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1 - axis)
    pack, within = jax.lax.div(lane, width), jax.lax.rem(lane, width)
    head = jax.lax.div(within, width // heads)
    return (column == head * group + pack).astype(F32).astype(jnp.bfloat16)
