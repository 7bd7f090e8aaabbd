"""Blocks of the Trellis kernels for packed heads: reads and writes of a program.

A block is a chunk of every pack.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import packs
from memjax_kernels._src.common.packs import decays as pack_decays
from memjax_kernels._src.common.packs.chunkwise import Layout
from memjax_kernels._src.trellis.packed import Gates

F32 = jnp.float32


class Packs(NamedTuple):
    """The packs from `start` to before `stop` of the P = rows * group of a program.

    They are read where a computation takes them and written where it ends: values that
    wait for those of other packs would be spilled.
    """

    start: int
    stop: int
    layout: Layout

    def tokens(self, ref) -> Float[Array, "p C DD"]:
        """Those of a reference [rows, C, group DD]."""
        width = ref.shape[2] // self.layout.group
        return jnp.stack(
            [ref[row, :, i * width : (i + 1) * width] for row, i in self._places()]
        )

    def store_tokens(self, ref, x: Float[Array, "p C DD"]) -> None:
        """Undoes `tokens`."""
        width = x.shape[-1]
        for each, (row, i) in zip(x, self._places(), strict=True):
            ref[row, :, i * width : (i + 1) * width] = each.astype(ref.dtype)

    def memories(self, refs):
        """Those of references [rows, group, M, DD], in float32."""

        def read(ref):
            return jnp.stack([ref[place] for place in self._places()]).astype(F32)

        return jax.tree.map(read, refs)

    def store_memories(self, refs, values) -> None:
        """Undoes `memories`."""

        def write(ref, x):
            for each, place in zip(x, self._places(), strict=True):
                ref[place] = each.astype(ref.dtype)

        jax.tree.map(write, refs, values)

    def of(self, x):
        """Those of an array of all packs; None of none."""
        return jax.tree.map(lambda x: x[self.start : self.stop], x)

    def gates(self, both: tuple[Gates, Gates]) -> tuple[Gates, Gates]:
        """Those of all packs' gates; passes that share a total still do."""
        first, second = both
        total = self.of(first.total)
        same = second.total is first.total
        return (
            Gates(self.of(first.gamma), total),
            Gates(self.of(second.gamma), total if same else self.of(second.total)),
        )

    def _places(self) -> list[tuple[int, int]]:
        """The batch element and the number in it of each pack."""
        return [divmod(i, self.layout.group) for i in range(self.start, self.stop)]


def each_group(layout: Layout) -> list[Packs]:
    """The groups of packs that go through the phases one behind the other."""
    size = layout.rows * layout.group // layout.phased
    starts = range(0, layout.rows * layout.group, size)
    return [Packs(start, start + size, layout) for start in starts]


def gates(x, layout: Layout) -> tuple[Gates, Gates]:
    """Gates of all packs, of references to `chunkwise.Blocks`."""
    return _gates(x.gates[:, :, : layout.gate_columns], layout)


def flags(x, layout: Layout) -> tuple[Array | None, Array | None]:
    """Flags of full and of reset chunks, [P, 1, 1]; None where there are none."""
    if not layout.opens and not layout.resets:
        return None, None
    columns = x.gates[:, :, layout.gate_columns :]
    # All tokens of a chunk have its flags.
    found = jnp.max(columns, axis=1, keepdims=True)[:, None]

    def flag(index):
        each = found[..., index : index + 1]
        return packs.each_pack(
            jnp.broadcast_to(each, (layout.rows, layout.group, 1, 1))
        )

    full = flag(0) if layout.opens else None
    return full, flag(int(layout.opens)) if layout.resets else None


def _gates(block: Array, layout: Layout) -> tuple[Gates, Gates]:
    """Gates of both passes, of a block [rows, C, R] of gammas and gates."""
    steps, totals = zip(*(_gates_of_row(row, layout) for row in block), strict=True)

    def join(*parts):
        return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)

    steps, totals = ([join(*x) for x in zip(*y, strict=True)] for y in (steps, totals))
    return Gates(steps[0], totals[0]), Gates(steps[-1], totals[-1])


def _gates_of_row(block: Array, layout: Layout):
    """Step sizes and sums of gates of each pass, of a batch element's [C, R]."""
    group, heads, (of_gamma, of_g) = layout.group, layout.heads, layout.passes
    each = heads * group
    gammas = block[:, : each * of_gamma]
    g = block[:, gammas.shape[1] :]
    sums = pack_decays.sum_gates(g)
    columns = jnp.concatenate([gammas, sums], axis=1)
    rows = pack_decays.transpose(columns)

    def total(index):
        coarse = each * (of_gamma + index)
        fine = coarse + each * of_g
        return pack_decays.total(columns, rows, (coarse, fine), group, heads)

    steps = [
        pack_decays.pack_heads(rows, each * index, group, heads)
        for index in range(of_gamma)
    ]
    return steps, [total(index) for index in range(of_g)]
