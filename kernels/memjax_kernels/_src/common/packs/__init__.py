"""Packed heads: layouts and reductions of the TPU kernels.

A register of a TPU has 128 lanes, and a head often 64 channels. Tokens are stored
as [C, H D], so that neighbouring heads fill the lanes, and are read and written there
without a copy. Values computed from them have tokens along the lanes instead: the first
head's C, then the second's, and so on. Sums over slots are then sums over sublanes,
which cost little, and the gates of tokens are rows.

Shapes: P packs of `heads` heads, C tokens, D channels of a head; CC and DD are those of
all heads of a pack. A product of all heads at once needs one operand that is zero where
rows and lanes are of two heads: `block_diagonal`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

F32 = jnp.float32


def lane(shape: tuple[int, ...]) -> Int[Array, "..."]:
    """The number of each lane."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)


def sublane(shape: tuple[int, ...]) -> Int[Array, "..."]:
    """The number of each row."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 2)


def head(shape: tuple[int, ...], heads: int) -> Int[Array, "..."]:
    """The number of each lane's head."""
    # Not `//`, whose treatment of signs is written for the TPU at hand.
    return jax.lax.div(lane(shape), jnp.int32(shape[-1] // heads))


def within(shape: tuple[int, ...], size: int) -> Int[Array, "..."]:
    """The number of each lane in its run of `size` lanes."""
    return jax.lax.rem(lane(shape), jnp.int32(size))


def block_diagonal(x: Float[Array, "*P C DD"], heads: int) -> Float[Array, "*P CC DD"]:
    """Each head's rows, the others' lanes zero."""
    stack = functools.partial(jnp.concatenate, axis=-2)
    if x.dtype == jnp.bfloat16 and x.shape[-2] % 16 == 0:
        # A word holds two rows: one AND clears both.
        words = pltpu.bitcast(x, jnp.int32)
        of = head(words.shape, heads)
        parts = [words & jnp.where(of == i, -1, 0) for i in range(heads)]
        return pltpu.bitcast(stack(parts), jnp.bfloat16)
    of, zero = head(x.shape, heads), jnp.zeros_like(x)
    return stack([jnp.where(of == i, x, zero) for i in range(heads)])


def every(x: Float[Array, "C N"], step: int, first: int) -> Float[Array, "C N"]:
    """Lanes `first`, `first` + `step` and so on of bfloat16, the others zero."""
    words = pltpu.bitcast(x, jnp.int32)
    chosen = jnp.where(within(words.shape, step) == first, -1, 0)
    return pltpu.bitcast(words & chosen, jnp.bfloat16)


def diagonal_blocks(x: Float[Array, "P CC DD"], heads: int) -> Float[Array, "P C DD"]:
    """Undoes `block_diagonal`: of each head's rows the head's own lanes."""
    return by_head(jnp.split(x, heads, axis=1))


def widen(numbers: Sequence[Float[Array, "P _ 1"]], width: int) -> Array:
    """A number of each head, in all of the head's lanes, [P, ., width]."""
    shape = (*numbers[0].shape[:-1], width)
    return by_head([jnp.broadcast_to(number, shape) for number in numbers])


def turned(x: Float[Array, "P L HR"], heads: int) -> Float[Array, "P R HL"]:
    """Each head's matrix transposed."""
    parts = jnp.split(jnp.swapaxes(x, 1, 2), heads, axis=1)
    return jnp.concatenate(parts, axis=2)


def by_head(parts: Sequence[Array]) -> Array:
    """The i-th part in the lanes of the i-th head."""
    of = head(parts[0].shape, len(parts))
    chosen = parts[-1]
    for i, part in enumerate(parts[:-1]):
        chosen = jnp.where(of == i, part, chosen)
    return chosen


def ends(row: Float[Array, "P 1 CC"], heads: int) -> list[Float[Array, "P 1 1"]]:
    """The value at each head's last token."""
    size = row.shape[-1] // heads
    return [row[:, :, (i + 1) * size - 1 : (i + 1) * size] for i in range(heads)]


def sums(rows: Float[Array, "P M DD"], heads: int) -> list[Float[Array, "P M 1"]]:
    """The sum over each head's lanes."""
    total = functools.partial(jnp.sum, axis=-1, keepdims=True)
    if heads == 1:
        return [total(rows)]
    of = head(rows.shape, heads)
    return [total(jnp.where(of == i, rows, 0.0)) for i in range(heads)]


def sum_heads(x: Float[Array, "P M DD"], heads: int, width: int | None = None) -> Array:
    """The same in all lanes of the head, of `width` lanes of all heads or as x."""
    return widen(sums(x, heads), width or x.shape[-1])


def lower(pairs: Float[Array, "P C CC"], heads: int) -> Float[Array, "P C CC"]:
    """Pairs whose second token, along the lanes, is no later than the first."""
    column = within(pairs.shape, pairs.shape[-1] // heads)
    return jnp.where(sublane(pairs.shape) >= column, pairs, 0.0)


def load_rows(
    ref: Any, group: int, heads: int = 1, ways: int = 1
) -> Float[Array, "P C DD"]:
    """A block [rows, C, group DD] of P = rows * group packs.

    Each of its heads is that of `ways` neighbours.
    """

    def of_row(ref):
        if ways == 1:
            width = ref.shape[1] // group
            ends = [(i * width, (i + 1) * width) for i in range(group)]
            return jnp.stack([ref[:, begin:end] for begin, end in ends])
        given = jnp.split(ref[...], max(1, group * heads // ways), axis=1)
        each = [given[i // ways] for i in range(group * heads)]
        packs = [each[i : i + heads] for i in range(0, len(each), heads)]
        return jnp.stack([jnp.concatenate(pack, axis=1) for pack in packs])

    return jnp.concatenate([of_row(ref.at[i]) for i in range(ref.shape[0])])


def store_rows(
    ref: Any, x: Float[Array, "P C DD"], heads: int = 1, ways: int = 1
) -> None:
    """Writes the transpose of `load_rows`: the sum over those that share a head."""

    def of_row(ref, x):
        if ways == 1:
            width = x.shape[-1]
            for i in range(x.shape[0]):
                ref[:, i * width : (i + 1) * width] = x[i].astype(ref.dtype)
            return
        each = [part for pack in x for part in jnp.split(pack, heads, axis=1)]
        parts = [each[i : i + ways] for i in range(0, len(each), ways)]
        sums = [functools.reduce(jnp.add, part) for part in parts]
        ref[...] = jnp.concatenate(sums, axis=1).astype(ref.dtype)

    for i, row in enumerate(jnp.split(x, ref.shape[0])):
        of_row(ref.at[i], row)


def each_pack(x: Float[Array, "rows group ..."]) -> Float[Array, "P ..."]:
    """A block's arrays of rows and their packs as those of P = rows * group packs."""
    return x.reshape(-1, *x.shape[2:])


def in_bfloat16(x: Float[Array, "..."], count: int = 3) -> list[Float[Array, "..."]]:
    """Parts of a float32 whose sum is x, all but the last with a bfloat16's digits.

    Of products in bfloat16, which round the last: with two parts they leave out 7 bits.
    """
    parts = []
    for _ in range(count - 1):
        # Rounded as bits: a cast and one back are five operations of Mosaic's.
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        bits = (bits + jnp.uint32(0x8000)) & jnp.uint32(0xFFFF0000)
        part = jax.lax.bitcast_convert_type(bits, F32)
        parts.append(part)
        x = x - part
    return [*parts, x]


def in_parts(
    product: Callable[[Array], Array], x: Float[Array, "..."], count: int = 3
) -> Array:
    """A product of x with zeros and ones in bfloat16.

    Args:
        product: of a part of x, in bfloat16.
        x: float32.
        count: of parts: three lose nothing, two leave out 7 bits.
    """
    return functools.reduce(jnp.add, map(product, in_bfloat16(x, count)))


def sigmoid(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """One transcendental operation, where exp takes a division as well."""
    return 0.5 * jnp.tanh(0.5 * x) + 0.5


def over_slots(reduce, x):
    """A reduction over slots, which lie along sublanes."""
    return reduce(x, axis=-2, keepdims=True)


def sum_slots(x: Float[Array, "P M L"]) -> Float[Array, "P 1 L"]:
    """Sums over slots."""
    return over_slots(jnp.sum, x)
