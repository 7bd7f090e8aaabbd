"""Products of groups of rows by a loop over blocks of neighbouring rows.

A block has one matrix. A matrix without rows is not read: decoding a token reads the
matrices of its experts alone.

Shapes: N rows, E groups, D input, F output.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from memjax_kernels._src.common.cpu import by_platform
from memjax_kernels._src.common.varying import vary_alike

#: Rows of a block at most: longer ones were not faster on a CPU.
LONGEST = 64


def rows(
    x: Float[Array, "N D"],
    weights: Float[Array, "E ..."],
    sizes: Int[Array, " E"],
    axes: tuple[int, int],
) -> Float[Array, "N F"]:
    """x_i W_g or x_i W_g^T of the rows of each group g; anything in rows of no group.

    Args:
        x: rows, those of group 0 first.
        weights: a matrix a group.
        sizes: rows of each group.
        axes: of a row and of its matrix, which are summed over.
    """
    length = _block_length(x, sizes)
    count, place = _blocks(sizes, length)
    padded = _padded(x, length)

    def multiply(j, y):
        group, first, _ = place(j)
        block = jax.lax.dynamic_slice_in_dim(padded, first, length)
        # Cast one at a time: a decoder must not read them all.
        matrix = _matrix(weights, group).astype(x.dtype)
        product = jax.lax.dot_general(block, matrix, ((axes[:1], axes[1:]), ((), ())))
        # The rows of the next group are written too, and then by its own blocks again.
        return jax.lax.dynamic_update_slice_in_dim(y, product, first, axis=0)

    width = weights.shape[2 if axes == (1, 0) else 1]
    y = vary_alike((jnp.zeros((padded.shape[0], width), x.dtype), x))[0]
    return jax.lax.fori_loop(0, count, multiply, y)[: x.shape[0]]


def outer(
    x: Float[Array, "N D"], dy: Float[Array, "N F"], sizes: Int[Array, " E"]
) -> Float32[Array, "E D F"]:
    """x_g^T dy_g of the rows of each group g."""
    length = _block_length(x, sizes)
    count, place = _blocks(sizes, length)
    left, right = _padded(x, length), _padded(dy, length)

    def add(j, dw):
        group, first, end = place(j)
        block = jax.lax.dynamic_slice_in_dim(left, first, length)
        other = jax.lax.dynamic_slice_in_dim(right, first, length)
        # Without the rows of the next group.
        own = first + jnp.arange(length) < end
        other = jnp.where(own[:, None], other, 0)
        product = jnp.matmul(block.T, other, preferred_element_type=jnp.float32)
        return dw.at[group].add(product)

    shape = (sizes.shape[0], x.shape[1], dy.shape[1])
    dw = vary_alike((jnp.zeros(shape, jnp.float32), x))[0]
    return jax.lax.fori_loop(0, count, add, dw)


def _block_length(x, sizes):
    """Rows of a block: the mean size of a group, rounded up to a power of two."""
    mean = -(-x.shape[0] // sizes.shape[0])
    return min(1 << (mean - 1).bit_length(), LONGEST)


def _blocks(sizes, length):
    """The number of blocks, and a function (j) -> group, first row, end of the group.

    Blocks begin with their group; a group without rows has none.
    """
    counts = (sizes + length - 1) // length
    last, ends = jnp.cumsum(counts), jnp.cumsum(sizes)

    def place(j):
        group = jnp.searchsorted(last, j, side="right")
        own = j - (last[group] - counts[group])
        return group, ends[group] - sizes[group] + own * length, ends[group]

    return last[-1], place


def _padded(x, length):
    """x with a block of zeros behind: the last block may begin anywhere."""
    return jnp.pad(x, ((0, length), (0, 0)))


def _matrix(weights, group):
    """The matrix of a group, without reading others."""
    if weights.dtype == jnp.float32:
        return weights[group]

    def alone(weights, group):
        # CPUs multiply float32. XLA would cast all matrices of half precision before
        # the loop, 60 times the work of a token, but moves nothing out of a branch.
        return jax.lax.cond(
            group >= 0, lambda: weights[group], lambda: jnp.zeros_like(weights[0])
        )

    return by_platform(alone, lambda weights, group: weights[group])(weights, group)
