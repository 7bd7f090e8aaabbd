"""The forward kernel of Lattice on a GPU: all chunks of a batch element and head."""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from memjax_kernels._src.common import mosaic
from memjax_kernels._src.common.mosaic import F32, ROWS, Static
from memjax_kernels._src.common.mosaic_programs import Forward, call
from memjax_kernels._src.lattice.pallas_gpu.inputs import ChunkInputs
from memjax_kernels._src.lattice.pallas_gpu.program import (
    Chunk,
    across_width,
    inverse_norm,
    l2_normalize,
    shared,
)


def forward(static: Static, x: ChunkInputs, *, with_residuals: bool):
    """Runs the forward kernel.

    Returns:
        y; the memory after the last full chunk; and if `with_residuals` the memory at
        every chunk's start, in the dtype of q, else None.
    """
    b, n, _, h, m = x.q.shape
    width = x.v.shape[-1]
    memory = jax.ShapeDtypeStruct((b, h, m, width), F32)
    residuals = jax.ShapeDtypeStruct((b, n, h, m, width), x.q.dtype)
    outputs = (
        jax.ShapeDtypeStruct(x.v.shape, x.v.dtype),
        memory,
        residuals if with_residuals else None,
    )
    scratch = shared(x) | {
        "memory": mosaic.tile(m, width, dtype=F32),
        "memory_arrived": plgpu.Barrier(),
        "arrived": plgpu.Barrier(num_arrivals=4),
        "reads": mosaic.tile(ROWS, width, dtype=x.q.dtype),
    }
    name = "memjax_lattice_forward"
    return call(_Forward, static, x, (), outputs, scratch, name)


class _Forward(Chunk, Forward):
    """The forward kernel of one batch element and head."""

    def all_chunks(self):
        self.prepare()
        super().all_chunks()

    def chunk(self, i, whole):
        scratch, ops = self.scratch, self.ops
        self.begin(i)
        plgpu.barrier_wait(scratch["arrived"])
        write, along, before, squares = self.residuals()
        taken, size = self.sums(write, along, before, squares)
        query = self.matrix("q") * inverse_norm(size)
        self.store("query", query)
        self.store("high", query * (1.0 + taken))
        plgpu.commit_smem()
        # The tokens are in registers and in operands: the next may come.
        pl.when(i + 1 < self.chunks)(lambda: self.fetch(i + 1))
        scores = ops.product(scratch["query"], scratch["write"], "nt")
        # Negated, so that both products add up in one accumulator. Its tile is free by
        # now.
        self.store("gram", -self.masked(scores))
        plgpu.commit_smem()
        reads = ops.total(
            (scratch["high"], scratch["operand"], "nn"),
            (scratch["gram"], scratch["h"], "nn"),
        )
        self.write(i, reads)
        # A chunk that stays open leaves the memory at its start.
        pl.when(i < whole)(self.write_memory)

    def write_memory(self):
        memory = self.matrix("memory")
        written = self.ops.product(self.scratch["write"], self.scratch["h"], "tn")
        after = memory + across_width(memory * written) * memory - written
        self.scratch["memory"][...] = l2_normalize(after)[0]
