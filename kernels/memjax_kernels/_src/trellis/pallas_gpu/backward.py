"""The backward kernel of Trellis on a GPU: chunks in reverse, each computed again.

This file moves data between global and shared memory; `chunk` has the arithmetic.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from memjax_kernels._src.common import mosaic
from memjax_kernels._src.common.mosaic import F32, ROWS, Static
from memjax_kernels._src.trellis.pallas_gpu.chunk import Chunk
from memjax_kernels._src.trellis.pallas_gpu.inputs import Inputs, Sizes


class Gradients(NamedTuple):
    """Outputs of the kernel.

    Attributes:
        q: as the tokens, like the next two.
        inputs: of each pass.
        alpha: of the targets.
        gates: rows `TOTAL`, `LAST` and `GAMMA` of each pass [B, n, H, 6, 64].
        last: per slot, what the last total gets from the memory [B, n, H, 2, M].
        start: memories [B, H, M, D] float32, like the next.
        empty: None if not given.
    """

    q: Any
    inputs: Any
    alpha: Any
    gates: Any
    last: Any
    start: Any
    empty: Any


def backward(static: Static, x: Inputs, residuals, d_y, d_after) -> Gradients:
    """Runs the kernel.

    Args:
        static: as in the forward pass.
        x: likewise.
        residuals: memories at every chunk's start, from there.
        d_y: cotangent of y, like the others below.
        d_after: of the memories after the last full chunk.
    """
    b, n, _, h, _ = x.q.shape
    sizes = x.sizes

    def like(a):
        return jax.ShapeDtypeStruct(a.shape, a.dtype)

    memory = tuple(map(like, x.start))
    outputs = Gradients(
        q=like(x.q),
        inputs=tuple(map(like, x.inputs)),
        alpha=like(x.alpha),
        gates=jax.ShapeDtypeStruct((b, n, h, 6, ROWS), F32),
        last=jax.ShapeDtypeStruct((b, n, h, 2, sizes.slots), F32),
        start=memory,
        empty=None if x.empty is None else memory,
    )
    x = x._replace(start=None, empty=None)
    given, scratch = (x, residuals, d_y, d_after), _scratch(sizes, x.q.dtype)

    def program(*refs):
        _Program(static, sizes, *refs).all_chunks()

    name = "memjax_trellis_backward"
    return mosaic.call(program, given, outputs, scratch, name, static.interpret)


def _scratch(sizes: Sizes, dtype):
    slots, widths = sizes.slots, sizes.widths

    def work(width, dtype=dtype):
        return mosaic.tile(ROWS, width, dtype=dtype)

    scratch = {
        "q": work(widths[0]),
        "alpha": work(slots),
        "d_y": work(widths[1]),
        "gates": mosaic.vectors(4, ROWS),
        "d_gates": mosaic.vectors(6, ROWS),
        "d_last": mosaic.vectors(2, slots),
        "scores1": work(ROWS),
        "d_scores": work(ROWS),
        "decayed": work(slots),
        "weighted": work(slots),
        "d_predicted": work(slots),
        "query": work(slots),
        "errors0": work(slots),
        "errors1": work(slots),
        "scores2": work(ROWS),
        # The reads of the first pass, then their cotangent.
        "reads": work(slots, F32),
        "arrived": plgpu.Barrier(num_arrivals=8),
        "memory_arrived": plgpu.Barrier(num_arrivals=2),
    }
    for i, width in enumerate(widths):
        scratch[f"inputs{i}"] = work(width)
        scratch[f"memory{i}"] = mosaic.tile(slots, width, dtype=dtype)
        scratch[f"d_memory{i}"] = mosaic.tile(slots, width, dtype=F32)
        scratch[f"d_operand{i}"] = mosaic.tile(slots, width, dtype=dtype)
    return scratch


class _Program(Chunk):
    """The kernel of one batch element and head."""

    def __init__(self, static, sizes, x, residuals, d_y, d_after, outputs, scratch):
        super().__init__(static, sizes, scratch)
        self.x, self.residuals, self.d_y, self.d_after = x, residuals, d_y, d_after
        self.out = outputs

    def all_chunks(self):
        scratch, arrived = self.scratch, self.scratch["memory_arrived"]
        for memory, given in zip(self.each("d_memory"), self.d_after, strict=True):
            plgpu.copy_gmem_to_smem(given.at[*self.at], memory, arrived)
        plgpu.barrier_wait(arrived)
        chunks, whole = self.sizes.chunks, self.x.whole[self.at[0]]

        # Nothing flows through a chunk that stays open: see `pass_on`.
        @pl.when(whole < chunks)
        def _():
            for memory in self.each("d_memory"):
                memory[...] = self.ops.zeros(memory.shape)

        # A sum over resets, which may be none.
        for i, out in enumerate(self.out.empty or ()):
            out[*self.at] = self.ops.zeros(scratch[f"d_memory{i}"].shape)
        if self.sizes.size < ROWS:
            for ref in self.tokens():
                ref[...] = self.ops.zeros(ref.shape, ref.dtype)
            plgpu.commit_smem()
        lax.fori_loop(0, chunks, lambda i, _: self.chunk(chunks - 1 - i, whole), None)
        plgpu.commit_smem()
        for memory, out in zip(self.each("d_memory"), self.out.start, strict=True):
            plgpu.copy_smem_to_gmem(memory, out.at[*self.at])
        plgpu.wait_smem_to_gmem(0)

    def tokens(self):
        scratch = self.scratch
        return scratch["q"], scratch["alpha"], scratch["d_y"], *self.each("inputs")

    def fetch(self, i):
        (row, head), x = self.at, self.x
        arrived, rows = self.scratch["arrived"], pl.ds(0, self.sizes.size)
        sources = (x.q, x.alpha, self.d_y, *x.inputs)
        for source, target in zip(sources, self.tokens(), strict=True):
            plgpu.copy_gmem_to_smem(
                source.at[row, i, :, head, :], target.at[rows], arrived
            )
        plgpu.copy_gmem_to_smem(
            x.gates.at[row, i, head], self.scratch["gates"], arrived
        )
        for source, target in zip(self.residuals, self.operands, strict=True):
            plgpu.copy_gmem_to_smem(source.at[row, i, head], target, arrived)

    def chunk(self, i, whole):
        row, head = self.at
        self.fetch(i)
        for operand, memory in zip(
            self.each("d_operand"), self.each("d_memory"), strict=True
        ):
            # Products take the tokens' dtype; the cotangent itself stays float32
            # between chunks.
            operand[...] = self.ops.matrix(memory).astype(operand.dtype)
        plgpu.barrier_wait(self.scratch["arrived"])
        plgpu.commit_smem()
        d_query = self.compute()
        self.pass_on(i, whole)
        # Gradients overwrite the tokens.
        scratch = self.scratch
        scratch["q"][...] = d_query.astype(scratch["q"].dtype)
        plgpu.commit_smem()
        rows = pl.ds(0, self.sizes.size)
        outputs = (self.out.q, self.out.alpha, *self.out.inputs)
        sources = (scratch["q"], scratch["alpha"], *self.each("inputs"))
        for source, out in zip(sources, outputs, strict=True):
            plgpu.copy_smem_to_gmem(source.at[rows], out.at[row, i, :, head, :])
        plgpu.copy_smem_to_gmem(scratch["d_gates"], self.out.gates.at[row, i, head])
        plgpu.copy_smem_to_gmem(scratch["d_last"], self.out.last.at[row, i, head])
        # Only until the tiles have been read: the next chunk's tokens overwrite them.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def pass_on(self, i, whole):
        """Cotangents of the other uses of the chunk-start memories."""
        ops = self.ops

        @pl.when(i == whole)
        def _():
            for memory, given in zip(self.each("d_memory"), self.d_after, strict=True):
                # Once a segment, so that the slow way serves and takes no shared
                # memory.
                more = ops.global_matrix(given, *self.at)
                memory[...] = ops.matrix(memory) + more

        if self.x.reset is None:
            return

        @pl.when((i > 0) & (self.x.reset[self.at[0], i] != 0))
        def _():
            for memory, out in zip(self.each("d_memory"), self.out.empty, strict=True):
                before = ops.global_matrix(out, *self.at)
                out[*self.at] = before + ops.matrix(memory)
                # The chunk started from `empty`: nothing flows to the memory before it.
                memory[...] = ops.zeros(memory.shape)
