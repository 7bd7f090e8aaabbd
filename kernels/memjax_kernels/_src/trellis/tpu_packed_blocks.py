"""Blocks of the Trellis kernels for packed heads: reads and writes of a program.

A block is a chunk, or a few, of every pack.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import packs, products
from memjax_kernels._src.common.gate_sums import Sums
from memjax_kernels._src.common.packs import decays as pack_decays
from memjax_kernels._src.common.packs.decays import Totals
from memjax_kernels._src.common.packs.layout import Layout
from memjax_kernels._src.trellis.packed import Gates

F32 = jnp.float32
BF16 = jnp.dtype(jnp.bfloat16)


class Packs(NamedTuple):
    """The packs from `start` to before `stop` of the P = rows * group of a program.

    Of the block's chunks number `chunk`.

    They are read where a computation takes them and written where it ends: values that
    wait for those of other packs would be spilled.
    """

    start: int
    stop: int
    chunk: int
    layout: Layout

    def tokens(self, ref) -> Float[Array, "p C DD"]:
        """Tokens of these packs in a reference [rows, chunks C, group DD]."""
        return jnp.stack([ref[at] for at in self._at_tokens(ref)])

    def store_tokens(self, ref, x: Float[Array, "p C DD"]) -> None:
        """Undoes `tokens`."""
        for each, at in zip(x, self._at_tokens(ref), strict=True):
            ref[at] = each.astype(ref.dtype)

    def _at_tokens(self, ref):
        width, size = ref.shape[2] // self.layout.group, self.layout.size
        tokens = slice(self.chunk * size, (self.chunk + 1) * size)
        lanes = [slice(i * width, (i + 1) * width) for i in range(self.layout.group)]
        return [(row, tokens, lanes[i]) for row, i in self._places()]

    def memories(self, refs):
        """Memories of these packs in references [rows, group, M, DD], in float32."""
        return _read(refs, lambda _: self._places())

    def store_memories(self, refs, values) -> None:
        """Undoes `memories`."""
        _write(refs, values, lambda _: self._places())

    @property
    def is_saved(self) -> bool:
        """Are the memories at the chunk's start saved by the forward kernel?"""
        return self.chunk % (self.layout.chunks // self.layout.saved) == 0

    @property
    def next_is_saved(self) -> bool:
        """Are those at the next chunk's start saved? Those at a block's start are."""
        return self._replace(chunk=self.chunk + 1).is_saved

    def saved(self, refs):
        """Memories before the chunk in [rows, group, saved M, DD], in float32."""
        return _read(refs, self._at_saved)

    def save(self, refs, values) -> None:
        """Undoes `saved`."""
        _write(refs, values, self._at_saved)

    def _at_saved(self, ref):
        index = self.chunk * self.layout.saved // self.layout.chunks
        return self._part(ref, self.layout.saved, index)

    def store_gates(self, ref, d: Float[Array, "p N CC"]) -> None:
        """Writes cotangents of gates to a reference [rows, group, chunks N, CC]."""
        _write(ref, d, lambda ref: self._part(ref, self.layout.chunks, self.chunk))

    def _part(self, ref, number, index):
        """The rows of part `index`, of `number` equal parts of each pack."""
        size = ref.shape[2] // number
        part = slice(index * size, (index + 1) * size)
        return [(*place, part) for place in self._places()]

    def of(self, x):
        """These packs of the chunk's array, of a list over chunks; None for None."""
        return None if x is None else x[self.chunk][self.start : self.stop]

    def gates(self, rows: list[list["Row"]]) -> tuple[Gates, Gates]:
        """Gates of both passes, which share an object where they have one gate."""
        each = [(rows[row][self.chunk], i) for row, i in self._places()]
        (of_gamma, of_g), group = self.layout.passes, self.layout.group
        gamma = [
            jnp.stack([row.gamma[index][i] for row, i in each])
            for index in range(of_gamma)
        ]
        columns = [packs.every(row.columns, group, i) for row, i in each]
        ones = each[0][0].ones
        wide = products.multiply(jnp.concatenate(columns), ones, "nn", BF16)
        wide = wide.reshape(len(each), self.layout.size, -1)
        parts = jnp.split(wide, wide.shape[-1] // gamma[0].shape[-1], axis=-1)
        # Coarse sums, fine sums, then gammas.
        total = [
            self._total(each, i, Sums(parts[i], parts[of_g + i])) for i in range(of_g)
        ]
        bounds = parts[2 * of_g :] or [None]
        first, last = (
            (gamma[0], total[0], bounds[0]),
            (gamma[-1], total[-1], bounds[-1]),
        )
        return Gates(*first), Gates(*last)

    def _total(self, each: list[tuple["Row", int]], index: int, wide: Sums) -> Totals:
        sums = [[part[i] for part in row.sums[index]] for row, i in each]
        row = Sums(*map(jnp.stack, zip(*sums, strict=True)))
        ends = zip(*(packs.ends(x, self.layout.heads) for x in row), strict=True)
        return Totals(row, wide, tuple(Sums(*end) for end in ends))

    def _places(self) -> list[tuple[int, int]]:
        """The batch element and the number in it of each pack."""
        return [divmod(i, self.layout.group) for i in range(self.start, self.stop)]


def _read(refs, places):
    """The arrays at the places of each reference, stacked, in float32."""

    def read(ref):
        return jnp.stack([ref[at] for at in places(ref)]).astype(F32)

    return jax.tree.map(read, refs)


def _write(refs, values, places) -> None:
    """Undoes `_read`."""

    def write(ref, x):
        for each, at in zip(x, places(ref), strict=True):
            ref[at] = each.astype(ref.dtype)

    jax.tree.map(write, refs, values)


def each_group(layout: Layout) -> list[Packs]:
    """The groups of packs, chunk after chunk, each behind the one before it."""
    size = layout.rows * layout.group // layout.phased
    starts = range(0, layout.rows * layout.group, size)
    chunks = range(layout.chunks)
    return [Packs(i, i + size, chunk, layout) for chunk in chunks for i in starts]


class Row(NamedTuple):
    """Gates of a batch element's chunk.

    Attributes:
        gamma: of each pass, along the lanes.
        sums: of g in each pass, along the lanes.
        columns: of all sums, and of gamma where it is bounded, in three parts with the
            digits of bfloat16.
        ones: where a product puts a pack's columns, in all lanes of their heads.
    """

    gamma: list[Float[Array, "G 1 CC"]]
    sums: list[Sums]
    columns: Float[Array, "C N"]
    ones: Float[Array, "N _"]


def gates(x, layout: Layout, bounded: bool) -> list[list[Row]]:
    """Gates of all packs, of references to `chunkwise.Blocks`: rows, then chunks."""
    found = x.gates[:, :, : layout.gate_columns]
    return [_gates_of_row(row, layout, bounded) for row in found]


def flags(x, layout: Layout) -> tuple[list[Array] | None, list[Array] | None]:
    """Flags of full and of reset chunks, [P, 1, 1]; None where there are none."""
    if not layout.opens and not layout.resets:
        return None, None
    columns = x.gates[:, :, layout.gate_columns :]
    # All tokens of a chunk have its flags.
    chunks = jnp.split(columns, layout.chunks, axis=1)
    found = [jnp.max(chunk, axis=1, keepdims=True)[:, None] for chunk in chunks]

    def flag(index):
        shape = (layout.rows, layout.group, 1, 1)
        each = [jnp.broadcast_to(x[..., index : index + 1], shape) for x in found]
        return [packs.each_pack(x) for x in each]

    full = flag(0) if layout.opens else None
    return full, flag(int(layout.opens)) if layout.resets else None


def _gates_of_row(block: Array, layout: Layout, bounded: bool) -> list[Row]:
    """Of a batch element's columns [chunks C, R] of gammas and gates."""
    group, heads, (of_gamma, of_g) = layout.group, layout.heads, layout.passes
    gammas = block[:, : heads * group * of_gamma]
    sums = pack_decays.sum_gates(block[:, gammas.shape[1] :], layout.size)
    rows = pack_decays.transpose(jnp.concatenate([gammas, sums], axis=1))
    wide = jnp.concatenate([sums, gammas], axis=1) if bounded else sums
    columns = jnp.concatenate(packs.in_bfloat16(wide), axis=1).astype(BF16)
    number = wide.shape[1] // group
    shape = (wide.shape[1], number * layout.size)
    after = packs.sublane(shape) - group * packs.head(shape, number)
    one = ((after >= 0) & (after < group)).astype(F32)
    # Columns of other packs are zero where this is used.
    ones = jnp.concatenate([one] * 3).astype(BF16)

    def chunk(rows, columns):
        given = [
            pack_decays.pack_heads(rows, start, group, heads)
            for start in range(0, rows.shape[0], heads * group)
        ]
        gamma, coarse, fine = given[:of_gamma], given[of_gamma:-of_g], given[-of_g:]
        return Row(gamma, [*map(Sums, coarse, fine)], columns, ones)

    each = jnp.split(rows, layout.chunks, axis=1), jnp.split(columns, layout.chunks)
    return [*map(chunk, *each)]
