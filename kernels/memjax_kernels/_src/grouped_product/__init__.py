"""Products of rows with the matrix of their group.

    y_i = x_i W_{group(i)}        rows sorted by group

TPUs have an instruction for it, `jax.lax.ragged_dot`. Elsewhere XLA computes that one
by multiplying every row with every matrix: 0.66 s for a token with 6 of 64 experts of
1,536 by 512, on a CPU, where the loop of `blocks` takes 5 ms.

Shapes: N rows, E groups, D input, F output.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from memjax_kernels._src.common.varying import vary_alike
from memjax_kernels._src.grouped_product import blocks

#: Dimension numbers of the gradient with respect to the matrices: x_g^T dy_g of each.
_OUTER = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def sort_by_group(
    group: Int[Array, " N"], count: int
) -> tuple[Int[Array, " N"], Int[Array, " N"], Int[Array, " E"]]:
    """The stable order of rows by group, its inverse, and the rows of each group.

    Args:
        group: of each row, in [0, E]; E itself is no group, and comes last.
        count: E.
    """

    def order_of(keys):
        # jax types it as equal on all devices of a shard_map, whatever the keys are,
        # and would sum gradients too early.
        return vary_alike((jnp.argsort(keys), keys))[0]

    order = order_of(group)
    return order, order_of(order), jnp.bincount(group, length=count)


def grouped_product(
    x: Float[Array, "N D"],
    weights: Float[Array, "E D F"],
    sizes: Int[Array, " E"],
) -> Float[Array, "N F"]:
    """Multiplies each row with the matrix of its group, in the dtype of x.

    Gradients are those of the equation; there is no forward mode (`jax.jvp`).

    Args:
        x: rows, those of group 0 first.
        weights: a matrix a group.
        sizes: rows of each group, N in all or fewer; what is left over gives 0.
    """
    # Inside a shard_map a gradient varies as its argument does.
    x, weights, sizes = vary_alike((x, weights, sizes))
    # Named for rematerialisation, to which this is no product.
    return checkpoint_name(_product(x, weights, sizes), "grouped_product")


@jax.custom_vjp
def _product(x, weights, sizes):
    y = _on_platform(
        functools.partial(blocks.rows, axes=(1, 0)),
        lambda x, weights, sizes: jax.lax.ragged_dot(x, weights.astype(x.dtype), sizes),
    )(x, weights, sizes)
    return _without_rest(y, sizes)


def _forward(x, weights, sizes):
    return _product(x, weights, sizes), (x, weights, sizes)


def _backward(residuals, dy):
    x, weights, sizes = residuals
    dx = _on_platform(
        functools.partial(blocks.rows, axes=(1, 1)),
        lambda dy, weights, sizes: jax.lax.ragged_dot(
            dy, weights.astype(dy.dtype).swapaxes(1, 2), sizes
        ),
    )(dy, weights, sizes)
    dw = _on_platform(
        blocks.outer,
        lambda x, dy, sizes: jax.lax.ragged_dot_general(
            x, dy, sizes, _OUTER, preferred_element_type=jnp.float32
        ),
    )(x, dy, sizes)
    return _without_rest(dx, sizes), dw.astype(weights.dtype), None


_product.defvjp(_forward, _backward)


def _on_platform(loop: Callable, instruction: Callable) -> Any:
    """`instruction` in a program for a TPU, `loop` in one for any other device."""
    return lambda *arrays: jax.lax.platform_dependent(
        *arrays, tpu=instruction, default=loop
    )


def _without_rest(y, sizes):
    """y with zeros in the rows of no group, which may hold anything."""
    taken = jnp.arange(y.shape[0]) < sizes.sum()
    return jnp.where(taken[:, None], y, 0)
