"""Products with weights that stay as a file has them, for generation on CPUs.

    y = x W,    W = s q + o

q has 4 or 8 bits, and 32 inputs of an output share s and o, as in the blocks Q4_0, Q4_1
and Q8_0 of GGUF; or W has 16 bits. Reading weights takes the time of such a product
where x has few rows. A block of outputs at a time is widened to float32, in cache, by
operations that XLA vectorises: conversion from bfloat16 by XLA itself would take 20
times as long as the product. Of one row, see `_row_product`.

Shapes: I inputs, O outputs; n blocks of N outputs, the last ones zeros.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Int

#: Numbers of a block, 4 MB in float32, and inputs that share a scale and an offset.
NUMBERS, GROUP = 1 << 20, 32
#: Inputs of a vector, and the most of a part of a row: longer parts take the compiler
#: gigabytes.
LANES, WIDTH = 8, 192


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stored:
    """A matrix [*I, *O], or [*O, I], as a file has it.

    Attributes:
        values: uint16 [n, N, I], bits of bfloat16; int16 [n, N, I], bits of float16;
            int8 [n, N, I]; or uint8 [n, N/2, I], whose low half-bytes are the first
            outputs of a block.
        scale: s, int16 [n, N, I/32], bits of float16; None of 16 bits.
        offset: o, likewise; None of 8 and 16 bits.
        shape: of the matrix. Static.
        axes: how many of the first axes are I; -1 is the last alone. Static.
    """

    values: Any
    scale: Any
    offset: Any
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    axes: int = dataclasses.field(metadata={"static": True})

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name}: weights as a file stores them are for generation alone; load the "
            "model without for_generation=True"
        )

    @property
    def size(self) -> int:
        """Elements of the matrix."""
        return math.prod(self.shape)

    @property
    def outputs(self) -> int:
        """O as one axis."""
        return self.size // self.values.shape[-1]


def store(weight: Float[np.ndarray, "..."], axes: int = 1) -> Any:
    """A matrix in the fewest bits that hold its float32 values exactly.

    Args:
        weight: [*I, *O]; or [*O, I], as an embedding has its rows.
        axes: how many of the first axes are I; -1 is the last alone.

    Returns:
        `Stored`; the weight itself where 16 bits do not hold it.
    """
    inputs = math.prod(weight.shape[:axes] if axes > 0 else weight.shape[axes:])
    rows = weight.reshape(inputs, -1).T if axes > 0 else weight.reshape(-1, inputs)
    number = -(-rows.size // NUMBERS)
    # An even number of outputs, so that blocks are as equal as they can be.
    each = 2 * -(-len(rows) // (2 * number))
    number = -(-len(rows) // each)
    blocks = [rows[i * each : (i + 1) * each] for i in range(number)]
    for form in FORMS:
        # The first block that has other numbers ends it.
        found = list(itertools.takewhile(bool, map(form, blocks)))
        if len(found) < number:
            continue
        parts = zip(*found, strict=True)
        values, scale, offset = (_joined(part, each) for part in parts)
        if offset is not None:
            low, high = np.split(values, 2, axis=1)
            values = low | high << 4
        return Stored(values, scale, offset, weight.shape, axes)
    return weight


def _joined(parts, each) -> Any:
    """Parts of all blocks, the last filled up with zeros; None for none."""
    if parts[0] is None:
        return None
    last = np.pad(parts[-1], ((0, each - len(parts[-1])), (0, 0)))
    return np.stack([*parts[:-1], last])


def _sixteen_bits(dtype):
    def form(rows):
        with np.errstate(over="ignore"):
            narrow = rows.astype(dtype)
        if not np.array_equal(narrow, rows):
            return None
        bits = np.uint16 if dtype is ml_dtypes.bfloat16 else np.int16
        return narrow.view(bits), None, None

    return form


def _blocks_of(bits, bounds):
    """The form with `bits` bits; `bounds` computes scale and offset of each group."""

    def form(rows):
        if rows.shape[1] % GROUP:
            return None
        groups = np.ascontiguousarray(rows, np.float32).reshape(len(rows), -1, GROUP)
        scale, offset = bounds(groups)
        scale = scale.astype(np.float16)
        wide, start = scale.astype(np.float32)[..., None], 0
        if offset is not None:
            offset = offset.astype(np.float16)
            start = offset.astype(np.float32)[..., None]
        least, most = (0, 15) if bits == 4 else (-128, 127)
        with np.errstate(divide="ignore", invalid="ignore"):
            values = np.nan_to_num(np.rint((groups - start) / wide))
        values = np.clip(values, least, most)
        if not np.array_equal(values * wide + start, groups):
            return None
        values = values.astype(np.uint8 if bits == 4 else np.int8)
        scale, offset = (x if x is None else x.view(np.int16) for x in (scale, offset))
        return values.reshape(rows.shape), scale, offset

    return form


def _least_and_largest(groups):
    low = groups.min(-1)
    return (groups.max(-1) - low) / 15, low


def _furthest(groups):
    low, high = groups.min(-1), groups.max(-1)
    furthest = np.where(-low > high, low, high)
    return furthest / -8, furthest


def _symmetric(groups):
    return np.abs(groups).max(-1) / 127, None


#: Of Q4_1, Q4_0, Q8_0, bfloat16 and float16.
FORMS = (
    _blocks_of(4, _least_and_largest),
    _blocks_of(4, _furthest),
    _blocks_of(8, _symmetric),
    _sixteen_bits(ml_dtypes.bfloat16),
    _sixteen_bits(np.float16),
)


def stored_product(x: Float[Array, "*B I"], weight: Stored) -> Float[Array, "*B O"]:
    """x W in float32, with the outputs as one axis."""
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    # 0 by way of x. Of weights that depend on nothing in a loop over tokens, XLA would
    # widen all before the loop, and keep them.
    zero = jax.lax.bitcast_convert_type(rows[0, 0], jnp.uint32) >> 31 >> 1
    parts = weight.values, weight.scale, weight.offset

    def block(part):
        values, scale, offset = part
        halves = _halves(values + zero.astype(values.dtype), scale, offset)
        # Weights first: a row times such weights takes up to 30 times as long in XLA.
        return jnp.concatenate([(half @ rows.T).T for half in halves], axis=-1)

    # Of 4 bits it would be no faster, and takes a minute to compile.
    if len(rows) == 1 and rows.shape[1] % GROUP == 0 and weight.offset is None:
        y = _row_product(rows[0], zero, weight.values, weight.scale)
    elif len(weight.values) == 1:
        y = block(jax.tree.map(lambda part: part[0], parts))
    else:
        y = jnp.moveaxis(jax.lax.map(block, parts), 0, -2)
    return y.reshape(*x.shape[:-1], -1)[..., : weight.outputs]


def _row_product(x, zero, values, scale):
    """Products [n, N] of one row x [I] with weights of 8 or 16 bits.

    One loop widens vectors of a part of a row of weights, and adds their products: only
    a vector of sums for each part goes to memory.
    """
    width = max(w for w in range(GROUP, WIDTH + 1, GROUP) if len(x) % w == 0)
    parts = len(x) // width
    x = x.reshape(parts, width)
    values, scale = jax.tree.map(
        lambda array: array.reshape(*array.shape[:-1], parts, -1), (values, scale)
    )

    # All slices before all products: in another order XLA's loop over float16 took five
    # times as long (jaxlib 0.10.2).
    starts = range(0, width, LANES)
    vectors = [values[..., i : i + LANES] + zero.astype(values.dtype) for i in starts]
    terms = [
        _of_bits(vector) * x[:, i : i + LANES][None, None]
        for i, vector in zip(starts, vectors, strict=True)
    ]
    if scale is not None:
        each = GROUP // LANES
        scale = _of_bits(scale + zero.astype(scale.dtype))
        terms = [
            sum(terms[each * g : each * (g + 1)]) * scale[..., g : g + 1]
            for g in range(width // GROUP)
        ]
    while len(terms) > 1:
        # In pairs: each addition of a chain would wait for the one before.
        terms = [sum(terms[i : i + 2]) for i in range(0, len(terms), 2)]
    # By products: sums over such short axes take XLA several times as long.
    return (terms[0] @ jnp.ones(LANES)) @ jnp.ones(parts)


def stored_rows(weight: Stored, at: Int[Array, "*B"]) -> Float[Array, "*B I"]:
    """The weights of some outputs; NaN where there is none."""
    rows = _places(weight, at, lambda x, block, place: x[block, place])
    known = (at >= 0) & (at < weight.outputs)
    return jnp.where(known[..., None], rows, jnp.nan)


def stored_numbers(
    weight: Stored, at: Int[np.ndarray, " N"]
) -> Float[np.ndarray, " N"]:
    """Elements at these places of the flat matrix."""
    inputs = weight.values.shape[-1]
    if weight.axes > 0:
        channel, output = np.divmod(at, weight.outputs)
    else:
        output, channel = np.divmod(at, inputs)
    host = jax.tree.map(np.asarray, weight)

    def take(x, block, place):
        each = inputs // x.shape[-1]
        return x[block, place, channel // each][:, None]

    return np.asarray(_places(host, output, take))[:, 0]


def _places(weight, output, take):
    """float32 numbers of outputs, of arrays of `take(array, block, place)`."""
    four = weight.offset is not None
    each = weight.values.shape[1] * (2 if four else 1)
    block, place = output // each, output % each
    low = place % (each // 2) if four else place
    values = take(weight.values, block, low)
    if four:
        values = jnp.where((place >= each // 2)[..., None], values >> 4, values & 15)
    if weight.scale is None:
        return _of_bits(values)
    return _affine(
        values,
        *(
            x if x is None else take(x, block, place)
            for x in (weight.scale, weight.offset)
        ),
    )


def _halves(values, scale, offset) -> tuple[Array, ...]:
    """The float32 weights [*B, N, I] of a block, of 4 bits by halves of its outputs."""
    if offset is not None:
        scales, offsets = (jnp.split(x, 2, axis=-2) for x in (scale, offset))
        return tuple(map(_affine, (values & 15, values >> 4), scales, offsets))
    if scale is not None:
        return (_affine(values, scale),)
    return (_of_bits(values),)


def _of_bits(values):
    """float32 numbers of bfloat16 or float16 by their bits, or of 8 bits."""
    if values.dtype == jnp.int16:
        # Kept as integers: to these XLA adds 0 for nothing, to float16 it does not.
        values = jax.lax.bitcast_convert_type(values, jnp.float16)
    if values.dtype != jnp.uint16:
        return values.astype(jnp.float32)
    # XLA converts bfloat16 element by element.
    return jax.lax.bitcast_convert_type(values.astype(jnp.uint32) << 16, jnp.float32)


def _affine(values, scale, offset=None):
    groups = values.reshape(*scale.shape, -1).astype(jnp.float32)
    groups = groups * _of_bits(scale)[..., None]
    if offset is not None:
        groups = groups + _of_bits(offset)[..., None]
    return groups.reshape(values.shape)
