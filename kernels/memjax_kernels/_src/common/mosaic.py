"""Building blocks of the Mosaic GPU kernels: tiles in shared memory and their products.

One program is one warpgroup of 128 threads for one batch element and head. Tokens of a
chunk are held in tiles of 64 rows, the size that a tensor-core instruction (wgmma)
takes; a shorter chunk is padded with rows of zeros. Operands of products are tiles in
shared memory. Products, and everything elementwise, are float32 in registers.

Layouts are explicit ("Lane" semantics): jax 0.10.2 infers none of these kernels in
reasonable time.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import PyTree

from memjax_kernels._src.common import jaxprs
from memjax_kernels._src.common.products import Form, multiply

# Rows of a tensor-core instruction.
ROWS = 64
F32 = jnp.float32
# jax 0.10.2 wants an index beside an indexed reference; later it may not be given.
_NO_INDEX = (None,) if jax.__version_info__ < (0, 11) else ()


def unsupported(chunk_size: int, **tokens: Any) -> str:
    """Why the kernels cannot take chunks of these tokens on any GPU; "" if they can."""
    for name, x in tokens.items():
        if x.dtype != jnp.bfloat16:
            return f"{name} must be bfloat16, got {x.dtype}"
        if x.shape[-1] != ROWS:
            return f"{name} must have {ROWS} channels, got {x.shape[-1]}"
    if chunk_size % 8 or chunk_size > ROWS:
        return f"chunk_size must be a multiple of 8 up to {ROWS}, got {chunk_size}"
    return ""


class Static(NamedTuple):
    """Static arguments of the kernels: an op's options, and the interpreter's."""

    rule: Any
    interpret: Any


def tile(*shape: int, dtype: Any):
    """Shared memory for a matrix, swizzled as copies and products need it."""
    # The swizzle works on 128 bytes, which are the width of a tile.
    width = 128 // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def vectors(*shape: int):
    """Shared memory for float32 vectors."""
    return plgpu.SMEM(shape, F32)


def call(
    program: Callable[..., None],
    given: PyTree[jax.Array],
    outputs: PyTree[jax.ShapeDtypeStruct],
    scratch: dict[str, Any],
    name: str,
    interpret: Any,
) -> Any:
    """Runs program(*references to `given`, to outputs, scratch by name).

    Once for each batch element and head of `given`, whose first array is [B, n, C, H,
    ...]. Returns arrays as the outputs.
    """
    leaves, tree = jax.tree.flatten(given)
    out_types, out_tree = jax.tree.flatten(outputs)

    def kernel(*refs, **scratch):
        given_refs: Any = jax.tree.unflatten(tree, refs[: len(leaves)])
        out_refs = jax.tree.unflatten(out_tree, refs[len(leaves) :])
        program(*given_refs, out_refs, scratch)

    batch, _, _, heads, _ = leaves[0].shape
    run = plgpu.kernel(
        kernel,
        out_type=out_types,
        scratch_types=scratch,
        grid=(batch, heads),
        grid_names=("batch", "heads"),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # Sums over the rows of a matrix go through these, 1 KiB for every 8 columns
            # at a time.
            reduction_scratch_bytes=2048,
        ),
        interpret=interpret,
    )
    return jax.tree.unflatten(out_tree, run(*leaves))


def along_rows(x: jax.Array, width: int) -> jax.Array:
    """[R] -> [R, width]."""
    return lax.broadcast_in_dim(x, (x.shape[0], width), (0,))


def along_columns(x: jax.Array, height: int) -> jax.Array:
    """[R] -> [height, R]."""
    return lax.broadcast_in_dim(x, (height, x.shape[0]), (1,))


def over_slots(reduce: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
    """A reduction of each row, broadcast back over the row."""
    return along_rows(reduce(x, axis=1), x.shape[1])


def value_and_vjp(
    function: Callable[..., jax.Array],
    inputs: Sequence[jax.Array],
    cotangent: jax.Array,
) -> tuple[jax.Array, ...]:
    """The value of an elementwise function, and the cotangents of its inputs.

    `jax.vjp`, with replacements for two primitives that Mosaic GPU cannot lower: the
    sum of cotangents, and negative integer powers.
    """

    def flat_value_and_vjp(cotangent, *inputs):
        value, vjp = jax.vjp(function, *inputs)
        return value, *vjp(cotangent)

    closed = jax.make_jaxpr(flat_value_and_vjp)(cotangent, *inputs)
    replaced: dict[str, jaxprs.Replacement] = {
        "add_any": lambda _, operands: operands[0] + operands[1],
        "integer_pow": lambda given, operands: _integer_power(operands[0], given["y"]),
    }
    return tuple(jaxprs.evaluate(closed, (cotangent, *inputs), replaced))


def _integer_power(x, exponent):
    # Mosaic GPU cannot lower powers; the exponents of derivatives are small.
    product = functools.reduce(lax.mul, [x] * abs(exponent))
    return product if exponent > 0 else 1.0 / product


def accumulate(*sums: Sequence[tuple[Any, Any, Form]]) -> tuple[jax.Array, ...]:
    """Sums of products of tiles, each in an accumulator of its own; waits for all."""

    def in_accumulators(*accumulators):
        # All are issued before the first is read, because reading waits.
        for triples, accumulator in zip(sums, accumulators, strict=True):
            for x, y, form in triples:
                x = x.T if form == "tn" else x
                plgpu.wgmma(accumulator, x, y.T if form == "nt" else y)
        return tuple(accumulator[...] for accumulator in accumulators)

    first = (triples[0] for triples in sums)
    shapes = ((x.shape[form == "tn"], y.shape[form != "nt"]) for x, y, form in first)
    accumulators = (plgpu.WGMMAAccumulatorRef(shape, F32) for shape in shapes)
    return pl.run_scoped(in_accumulators, *accumulators)


class TileOps:
    """Loads and matrix products, on a GPU or in the Mosaic interpreter.

    The interpreter of jax 0.10.2 has neither layouts nor transposed operands; there
    loads ignore the layout and products are computed on values.
    """

    def __init__(self, interpret: Any):
        self.interpreted = interpret is not None and interpret is not False

    def products(self, *triples: tuple[Any, Any, Form]) -> tuple[jax.Array, ...]:
        """x y^T, x y or x^T y for tiles (x, y, form), side by side."""
        if self.interpreted:
            # The interpreter is held against the token loop, which is float32.
            of_values = functools.partial(multiply, dtype=jnp.dtype(F32))
            return tuple(of_values(x[...], y[...], form) for x, y, form in triples)
        return accumulate(*([triple] for triple in triples))

    def product(self, x: Any, y: Any, form: Form) -> jax.Array:
        return self.products((x, y, form))[0]

    def total(self, *triples: tuple[Any, Any, Form]) -> jax.Array:
        """The sum of products, in one accumulator."""
        if self.interpreted:
            return functools.reduce(jnp.add, self.products(*triples))
        return accumulate(triples)[0]

    def matrix(self, ref: Any) -> jax.Array:
        """A tile in float32, laid out as products are."""
        # The layout of products, so that sums with them need no exchange between
        # threads.
        return self._load(ref, (), plgpu.Layout.WGMMA).astype(F32)

    def global_matrix(self, ref: Any, *index: Any) -> jax.Array:
        """A float32 matrix in global memory; slow, so only for rare loads."""
        if self.interpreted:
            return ref[index]
        layout = plgpu.Layout.WGMMA
        return plgpu.load(ref.at[index], *_NO_INDEX, layout=layout, optimized=False)

    def row_vector(self, ref: Any, *index: Any) -> jax.Array:
        """A vector with one element for each row of a matrix."""
        return self._load(ref, index, plgpu.Layout.WGMMA.reduce(1))

    def column_vector(self, ref: Any, *index: Any) -> jax.Array:
        """A vector with one element for each column of a matrix."""
        return self._load(ref, index, plgpu.Layout.WGMMA.reduce(0))

    def iota(self, shape: tuple[int, int], axis: int) -> jax.Array:
        if self.interpreted:
            return lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)

    def zeros(self, shape: tuple[int, ...], dtype: Any = F32) -> jax.Array:
        zeros = jnp.zeros(shape, dtype)
        if self.interpreted:
            return zeros
        return plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)

    def causal_mask(self, size: int) -> jax.Array:
        """Bool[64, 64]: i >= j, both below `size`."""
        rows, columns = (self.iota((ROWS, ROWS), axis) for axis in (0, 1))
        # Rows of padding see nothing, and so add nothing to sums over tokens.
        return (rows >= columns) & (rows < size)

    def _load(self, ref, index, layout):
        if self.interpreted:
            return ref[index] if index else ref[...]
        return plgpu.load(ref.at[index or ...], *_NO_INDEX, layout=layout)
