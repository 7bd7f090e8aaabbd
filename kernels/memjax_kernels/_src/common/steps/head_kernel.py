"""A function of a batch element's heads on a TPU in one kernel: for decoding steps.

A step is bound by the bandwidth of its memory, and XLA passes over it for every
product, in layouts of its own. The kernel holds all arrays of some heads in fast
memory, and runs the function on them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int, PyTree

from memjax_kernels._src.common import (
    gradients,
    implementations,
    packs,
    partition,
    products,
    varying,
)
from memjax_kernels._src.common.packs import tuned
from memjax_kernels._src.common.packs.blocks import heads_of_rows
from memjax_kernels._src.common.products import EXACT

F32 = jnp.float32


def by_heads(
    function: Callable[..., tuple[PyTree, PyTree]],
    number: Int[Array, " B"],
    rows: PyTree,
    changed: PyTree,
    fixed: PyTree,
) -> tuple[PyTree, PyTree]:
    """The function's results, by a kernel where it is lowered for a TPU.

    Args:
        function: (multiply, number, rows, changed, fixed) -> (changed, rows), of arrays
            with any leading axes; number(n) is one number for n axes.
        number: of each batch element.
        rows: float32 [B, H, D], or [B, H], at least one.
        changed: float32 [B, H, ...], written where they were read.
        fixed: likewise, only read.
    """

    def plain(number, *given):
        def of(axes):
            return number.reshape(-1, *[1] * (axes - 1))

        return function(EXACT, of, *given)

    given = number, rows, changed, fixed
    kernel = gradients.like(plain, functools.partial(by_heads_tpu, function))
    heads = jax.tree.leaves(rows)[0].shape[1]
    reason = "" if _together(heads, given[1:]) else f"no number of {heads} heads fits"
    forms = {"xla": plain, "pallas_tpu": kernel}
    return implementations.choose("step", None, forms, {"pallas_tpu": reason})(*given)


def by_heads_tpu(
    function: Callable[..., tuple[PyTree, PyTree]],
    number: Int[Array, " B"],
    rows: PyTree,
    changed: PyTree,
    fixed: PyTree,
    *,
    interpret: Any = False,
) -> tuple[PyTree, PyTree]:
    """By the kernel; `interpret` runs where there is no TPU."""
    share = functools.partial(_on_device, function=function, interpret=interpret)

    # As `partition` divides them: tokens [B, 1, 1, H, ...], others [B, H, ...]. Numbers
    # of a head are a column, of which Mosaic makes blocks.
    def token(x):
        return x.reshape(x.shape[0], 1, 1, x.shape[1], -1)

    given = jax.tree.map(token, rows), number[:, None]
    changed, rows = partition.chunkwise(share)(given, changed, fixed)
    return changed, jax.tree.map(lambda x: x[:, 0, 0], rows)


def _on_device(given, changed, fixed, *, function, interpret):
    """On a device's share."""
    rows, number = jax.tree.map(lambda x: x[:, 0, 0], given[0]), given[1][:, 0]
    first = jax.tree.leaves(rows)[0]
    batch, heads = first.shape[:2]
    # On a mesh some heads may have no fitting number, and then all are together.
    together = _together(heads, (rows, changed, fixed)) or heads

    def kernel(number, rows, changed, fixed, new, results):
        def of(axes):
            return number[0, pl.program_id(0)]

        given = jax.tree.map(lambda ref: ref[0], (rows, changed, fixed))
        found = function(multiply_in_parts, of, *given)
        jax.tree.map(lambda ref, x: ref.__setitem__(0, x), (new, results), found)

    def specs(tree):
        def spec(x):
            shape = (1, together, *x.shape[2:])
            return pl.BlockSpec(shape, lambda b, h: (b, h, *[0] * (x.ndim - 2)))

        return jax.tree.map(spec, tree)

    def unit(x):
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

    of_one = jax.tree.map(unit, (rows, changed, fixed))
    shapes = jax.eval_shape(lambda *x: function(EXACT, lambda _: 0, *x), *of_one)
    outputs = jax.tree.map(
        lambda x: varying.like(first, (batch, *x.shape), F32), shapes
    )
    count = 1 + len(jax.tree.leaves(rows))
    changed, rows = pl.pallas_call(
        kernel,
        grid=(batch, heads // together),
        in_specs=(
            pl.BlockSpec(memory_space=pltpu.SMEM),
            *specs((rows, changed, fixed)),
        ),
        out_specs=specs(outputs),
        out_shape=outputs,
        input_output_aliases={
            count + i: i for i in range(len(jax.tree.leaves(changed)))
        },
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel")
        ),
        interpret=interpret,
        name="by_heads",
    )(*varying.vary_alike((number[None], rows, changed, fixed)))
    return changed, jax.tree.map(lambda x: x[:, None, None], rows)


def multiply_in_parts(x: Array, y: Array, form: products.Form) -> Array:
    """A product of float32 matrices, each as two parts in bfloat16.

    Exact to 2^-16 of its terms, in half of the matrix unit's passes for float32 and a
    quarter of their loads.
    """
    dot = functools.partial(products.multiply, form=form, dtype=jnp.dtype(jnp.bfloat16))
    (x, rest_x), (y, rest_y) = (packs.in_bfloat16(z, 2) for z in (x, y))
    join = functools.partial(jnp.concatenate, axis=-2)
    # Few rows: parts that meet the same operand are one product.
    if form == "tn":
        return dot(join([x, rest_x, x]), join([y, y, rest_y]))
    rows = x.shape[-2]
    both = dot(join([x, rest_x]), y)
    return both[..., :rows, :] + (dot(x, rest_y) + both[..., rows:, :])


def _together(heads: int, given: PyTree) -> int:
    return heads_of_rows(heads, jax.tree.leaves(given), tuned.SIZES.head_step)
