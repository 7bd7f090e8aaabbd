"""One token of Lattice with C = 1 in both GPU kernels.

`chunk.token` has the equations. The memory is a matrix in registers while a token is
written, laid out as products are: sums over the width stay within a warp, sums over
slots (`axis=0`) go through shared memory.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from memjax_kernels._src.common import mosaic
from memjax_kernels._src.common.mosaic import TileOps
from memjax_kernels._src.lattice.pallas_gpu.inputs import (
    GATES,
    GROUP,
    Static,
    TokenInputs,
)
from memjax_kernels._src.lattice.pallas_gpu.program import inverse_norm

# Sums over slots in one go.
REDUCTIONS = {"reduction_bytes": 8192}


def shared(x: TokenInputs):
    """Scratch of both kernels."""
    m, width = x.q.shape[-1], x.v.shape[-1]
    return {
        "q": mosaic.vectors(GROUP, m),
        "k": mosaic.vectors(GROUP, m),
        "v": mosaic.vectors(GROUP, width),
        "gamma": mosaic.vectors(GATES),
    }


class Written(NamedTuple):
    """Residuals of a token's write; [M] but for matrices [M, V].

    Attributes:
        h: matrix, h in every row.
        along: <s, h>.
        across: |h|^2 - <s, h>^2.
        target: c.
        write: gamma c.
        rows: matrix, the memory before the division by its norms.
        size: what |s|^2 grows by.
        scale: 1 / |s| to read with.
    """

    h: Any
    along: Any
    across: Any
    target: Any
    write: Any
    rows: Any
    size: Any
    scale: Any


class Program:
    """One token in both kernels."""

    def __init__(self, static: Static, x: TokenInputs, scratch):
        self.variant, self.x, self.scratch = static.rule.variant, x, scratch
        self.ops = TileOps(static.interpret)
        self.at = lax.axis_index("batch"), lax.axis_index("heads")
        self.groups = x.q.shape[1]
        self.slots, self.width = x.q.shape[-1], x.v.shape[-1]

    def tokens(self):
        return {"q": self.x.q, "k": self.x.k, "v": self.x.v}

    def fetch(self, group):
        """Takes a group's tokens in, once all threads are done with the last one's."""
        (row, head), arrived = self.at, self.scratch["arrived"]
        plgpu.commit_smem()
        for name, source in self.tokens().items():
            source = source.at[row, group, :, head, :]
            plgpu.copy_gmem_to_smem(source, self.scratch[name], arrived)
        gamma = self.x.gamma.at[row, group, head]
        plgpu.copy_gmem_to_smem(gamma, self.scratch["gamma"], arrived)
        plgpu.barrier_wait(arrived)

    def clear(self, memory, group, t):
        """Replaces a memory by the empty one, where token t starts from that."""
        if self.x.reset is None:
            return

        @pl.when(self.x.reset[self.at[0], group, t] != 0)
        def _():
            memory[...] = self.ops.global_matrix(self.x.empty, *self.at)

    def by_slot(self, name, t):
        return self.ops.row_vector(self.scratch[name], t)

    def by_width(self, name, t):
        return self.ops.column_vector(self.scratch[name], t)

    def rows(self, vector):
        """[M] -> [M, V]."""
        return mosaic.along_rows(vector, self.width)

    def columns(self, vector):
        """[V] -> [M, V]."""
        return mosaic.along_columns(vector, self.slots)

    def write(self, memory, t) -> Written:
        k, v = self.by_slot("k", t), self.by_width("v", t)
        match self.variant:
            case "dec":
                h = jnp.sum(self.rows(k) * memory, axis=0) - v
            case "enc":
                h = v
            case _:
                h = -v
        h = self.columns(h)
        along = jnp.sum(memory * h, axis=1)
        across = jnp.sum(h * h, axis=1) - along * along
        target = along - k if self.variant == "enc" else k
        write = self.scratch["gamma"][t] * target
        rows = self.rows(1.0 + write * along) * memory - self.rows(write) * h
        # |s|² after a write: the part along s stays 1, the part across adds its square.
        size = write * write * across
        scale = inverse_norm(size)
        return Written(h, along, across, target, write, rows, size, scale)
