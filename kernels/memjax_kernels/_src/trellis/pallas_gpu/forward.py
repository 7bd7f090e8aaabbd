"""The forward kernel of Trellis on a GPU; `entry` says when it runs.

One program takes all chunks of one batch element and head. Its memories stay in shared
memory in float32; products read a copy in the dtype of the tokens, which is also
saved of every chunk's start for a gradient. The next chunk's tokens are copied in
during the computation.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from memjax_kernels._src.common import mosaic
from memjax_kernels._src.common.mosaic import F32, ROWS, Static, TileOps
from memjax_kernels._src.common.products import Form
from memjax_kernels._src.trellis import functions
from memjax_kernels._src.trellis.pallas_gpu.inputs import Inputs

# Chunks of tokens in shared memory at a time.
STAGES = 2


def forward(static: Static, x: Inputs, *, with_residuals: bool):
    """Runs the kernel.

    Returns:
        y; the memories after the last full chunk; those at every chunk's start in the
        dtype of q, if `with_residuals`.
    """
    b, n, size, h, _ = x.q.shape
    sizes = x.sizes
    shapes = [(sizes.slots, width) for width in sizes.widths]
    dtype = x.q.dtype
    memory = [jax.ShapeDtypeStruct((b, h, *s), F32) for s in shapes]
    chunk_starts = [jax.ShapeDtypeStruct((b, n, h, *s), dtype) for s in shapes]
    outputs = (
        jax.ShapeDtypeStruct((b, n, size, h, sizes.widths[1]), x.inputs[1].dtype),
        tuple(memory),
        tuple(chunk_starts) if with_residuals else (),
    )
    work = functools.partial(mosaic.tile, ROWS, dtype=dtype)
    staged = functools.partial(mosaic.tile, STAGES, ROWS, dtype=dtype)
    scratch = {
        "q": staged(sizes.widths[0]),
        "alpha": staged(sizes.slots),
        "gates": mosaic.vectors(STAGES, 4, ROWS),
        "scores": work(ROWS),
        "errors": work(sizes.slots),
        "decayed": work(sizes.slots),
        "query": work(sizes.slots),
        "y": work(sizes.widths[1]),
        "arrived": plgpu.Barrier(num_arrivals=5, num_barriers=STAGES),
        "memory_arrived": plgpu.Barrier(num_arrivals=2),
    }
    for i, shape in enumerate(shapes):
        scratch[f"inputs{i}"] = staged(shape[1])
        scratch[f"memory{i}"] = mosaic.tile(*shape, dtype=F32)
        scratch[f"operand{i}"] = mosaic.tile(*shape, dtype=dtype)

    def program(*refs):
        _Program(static, sizes, *refs).all_chunks()

    name = "memjax_trellis_forward"
    return mosaic.call(program, (x,), outputs, scratch, name, static.interpret)


class _Program:
    """The kernel of one batch element and head."""

    def __init__(self, static, sizes, x, outputs, scratch):
        self.static, self.sizes = static, sizes
        self.x, self.scratch = x, scratch
        self.y, self.after, self.residuals = outputs
        self.ops = TileOps(static.interpret)
        self.row, self.head = lax.axis_index("batch"), lax.axis_index("heads")

    def each(self, name):
        return [self.scratch[f"{name}{i}"] for i in (0, 1)]

    def all_chunks(self):
        row, head, chunks = self.row, self.head, self.sizes.chunks
        self.fetch_memories(self.x.start)
        # Copies fill the first rows only; the others enter products and must be zeros.
        if self.sizes.size < ROWS:
            for ref in (self.scratch["q"], self.scratch["alpha"], *self.each("inputs")):
                for stage in range(STAGES):
                    ref[stage] = self.ops.zeros(ref.shape[1:], ref.dtype)
            plgpu.commit_smem()
        self.fetch_tokens(jnp.int32(0))
        whole = self.x.whole[row]
        lax.fori_loop(0, chunks, lambda i, _: self.chunk(i, whole), None)
        plgpu.commit_smem()
        for memory, after in zip(self.each("memory"), self.after, strict=True):
            plgpu.copy_smem_to_gmem(memory, after.at[row, head])
        plgpu.wait_smem_to_gmem(0)

    def fetch_memories(self, source):
        arrived = self.scratch["memory_arrived"]
        for memory, given in zip(self.each("memory"), source, strict=True):
            plgpu.copy_gmem_to_smem(given.at[self.row, self.head], memory, arrived)
        plgpu.barrier_wait(arrived)

    def fetch_tokens(self, chunk):
        """Begins the copies of a chunk's tokens."""
        stage = lax.rem(chunk, STAGES)
        arrived = self.scratch["arrived"].at[stage]
        rows = pl.ds(0, self.sizes.size)
        x, scratch = self.x, self.scratch
        for source, target in zip(
            (x.q, x.alpha, *x.inputs),
            (scratch["q"], scratch["alpha"], *self.each("inputs")),
            strict=True,
        ):
            source = source.at[self.row, chunk, :, self.head, :]
            plgpu.copy_gmem_to_smem(source, target.at[stage, rows], arrived)
        gates = x.gates.at[self.row, chunk, self.head]
        plgpu.copy_gmem_to_smem(gates, scratch["gates"].at[stage], arrived)

    def chunk(self, i, whole):
        stage = lax.rem(i, STAGES)
        # Into the other stage, whose tokens the chunk before has used up.
        pl.when(i + 1 < self.sizes.chunks)(lambda: self.fetch_tokens(i + 1))
        plgpu.wait_smem_to_gmem(0)
        self.begin(i)
        plgpu.barrier_wait(self.scratch["arrived"].at[stage])
        self.compute(i, stage, whole)

    def begin(self, i):
        """The memories at the chunk's start, as operands and as residuals."""
        x, row, head = self.x, self.row, self.head
        if x.reset is not None:
            again = (i > 0) & (x.reset[row, i] != 0)
            pl.when(again)(lambda: self.fetch_memories(x.empty))

        for memory, operand in zip(
            self.each("memory"), self.each("operand"), strict=True
        ):
            operand[...] = self.ops.matrix(memory).astype(operand.dtype)
        plgpu.commit_smem()
        for operand, residuals in zip(
            self.each("operand"), self.residuals, strict=False
        ):
            plgpu.copy_smem_to_gmem(operand, residuals.at[row, i, head])

    def compute(self, i, stage, whole):
        ops, scratch, operands = self.ops, self.scratch, self.each("operand")
        q, inputs = scratch["q"].at[stage], [x.at[stage] for x in self.each("inputs")]
        triples: list[tuple[Any, Any, Form]] = [
            (x, m, "nt") for x, m in zip(inputs, operands, strict=True)
        ]
        *predicted, scores = ops.products(*triples, (q, inputs[0], "nt"))
        full = i < whole
        y = self.one_pass(0, stage, predicted[0], q, scores, full)
        query = functions.apply(self.static.rule.activation, y, mosaic.over_slots)
        scratch["query"][...] = query.astype(scratch["query"].dtype)
        y = self.one_pass(1, stage, predicted[1], scratch["query"], None, full)
        scratch["y"][...] = y.astype(scratch["y"].dtype)
        plgpu.commit_smem()
        rows = pl.ds(0, self.sizes.size)
        target = self.y.at[self.row, i, :, self.head, :]
        plgpu.copy_smem_to_gmem(scratch["y"].at[rows], target)

    def one_pass(self, index, stage, predicted, query, scores, full):
        """Reads of a pass; its memory becomes the one after a full chunk."""
        ops, scratch, slots = self.ops, self.scratch, self.sizes.slots
        operand, memory = self.each("operand")[index], self.each("memory")[index]
        x = self.each("inputs")[index].at[stage]
        total = ops.row_vector(scratch["gates"], stage, 2 * index)
        gamma = ops.row_vector(scratch["gates"], stage, 2 * index + 1)
        last = scratch["gates"][stage, 2 * index, ROWS - 1]
        alpha = ops.matrix(scratch["alpha"].at[stage])
        phi = self.static.rule.phi
        error = functions.error_gradient(phi, predicted, alpha, mosaic.over_slots)
        # Negated, so that products are added.
        error = -error * mosaic.along_rows(gamma, slots)
        decayed = error * mosaic.along_rows(jnp.exp(last - total), slots)
        scratch["errors"][...] = error.astype(scratch["errors"].dtype)
        scratch["decayed"][...] = decayed.astype(scratch["decayed"].dtype)
        plgpu.commit_smem()
        # The second pass's query depends on the first, so that its scores come late.
        if index == 1:
            scores = ops.product(query, scratch["errors"], "nt")
        other = ops.column_vector(scratch["gates"], stage, 2 * index)
        scores = decays(ops, total, other, self.sizes.size) * scores
        scratch["scores"][...] = scores.astype(scratch["scores"].dtype)
        plgpu.commit_smem()
        # y1 = M q is read through rows of the memory, y = M^T f through columns.
        written, form = (scratch["errors"], "nt") if index == 0 else (x, "nn")
        past, new, added = ops.products(
            (query, operand, form),
            (scratch["scores"], written, "nn"),
            (scratch["decayed"], x, "tn"),
        )
        # A chunk that stays open leaves the memory at its start.
        left, kept = jnp.where(full, jnp.exp(last), 1.0), jnp.where(full, 1.0, 0.0)
        memory[...] = left * ops.matrix(memory) + kept * added
        return mosaic.along_rows(jnp.exp(total), past.shape[1]) * past + new


def decays(ops, total, other, size) -> jax.Array:
    """exp(total_i - total_j) for j <= i < size, else 0: masked before exp."""
    difference = mosaic.along_rows(total, ROWS) - mosaic.along_columns(other, ROWS)
    return jnp.exp(jnp.where(ops.causal_mask(size), difference, -1e30))
