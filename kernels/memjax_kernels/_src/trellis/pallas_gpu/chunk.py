"""A chunk in the backward kernel of Trellis on a GPU.

Per pass, with x its input, M the memory at the chunk's start, N the one after, and U,
W, cs as in `segment`; a bar denotes a cotangent, and q is the query of the pass, y1 of
the first:

    w = exp(cs_C - cs)      A = (q x^T) * W, or (q U^T) * W in the second
    first:   A- = -(y- U^T) * W    q- = (e^cs y-) M + A- x        U- = -A^T y- - ...
             x- = A-^T q - (w U) N- + Z- M
             M- = e^cs_C N- + (e^cs y-)^T q + Z-^T x
    second:  A- = -(y- x^T) * W    q- = e^cs (y- M^T) + A- U      U- = A-^T q - ...
             x- = -A^T y- - (w U) N- + Z- M
             M- = e^cs_C N- + (e^cs q)^T y- + Z-^T x
    U- = ... - w (x N-^T)    Z-, alpha- = vjp of the error's gradient
    cs- = <q, q-> - gamma gamma-, and in the chunk's last token the sums over it of
    -w <U, x N-^T> and over the memory of e^cs_C <N-, M>
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from memjax_kernels._src.common import mosaic
from memjax_kernels._src.common.mosaic_programs import Backward
from memjax_kernels._src.trellis.pallas_gpu.forward import Passes
from memjax_kernels._src.trellis.pallas_gpu.inputs import GAMMA, LAST, TOTAL


class Chunk(Passes, Backward):
    """The arithmetic of a batch element and head; all arrays are in shared memory."""

    def __init__(self, *given):
        super().__init__(*given)
        self.operands, self.slots = self.each("operand"), self.x.alpha.shape[-1]

    def fetch(self, i):
        super().fetch(i)
        both = zip(self.each("d_operand"), self.each("d_memory"), strict=True)
        for operand, memory in both:
            # Products take the tokens' dtype; the cotangent itself stays float32
            # between chunks.
            operand[...] = self.ops.matrix(memory).astype(operand.dtype)

    def compute(self, full):
        """Gradients of a chunk; those of inputs replace them."""
        self.recompute_first_pass()
        self.recompute_query()
        self.second_pass(full)
        query, reads = self.scratch["query"], self.scratch["reads"]
        # `reads` now holds their cotangent, and the query is used no more: its tile is
        # free.
        query[...] = self.ops.matrix(reads).astype(query.dtype)
        self.store("q", self.first_pass(query, full))

    def recompute_first_pass(self):
        """Errors and scores of the first pass, as in the forward kernel."""
        scratch, ops = self.scratch, self.ops
        q, x = scratch["q"], scratch["inputs0"]
        predicted, scores = ops.products((x, self.operands[0], "nt"), (q, x, "nt"))
        _, gamma, _ = self.gates(0)
        error = self.error(predicted) * mosaic.along_rows(gamma, self.slots)
        scratch["errors0"][...] = error.astype(q.dtype)
        scores = self.decays(0) * scores
        scratch["scores1"][...] = scores.astype(q.dtype)
        # Tensor cores and copies see what threads have written to shared memory only
        # after a commit.
        plgpu.commit_smem()

    def recompute_query(self):
        """Reads of the first pass, and the query of the second."""
        scratch = self.scratch
        past, new = self.ops.products(
            (scratch["q"], self.operands[0], "nt"),
            (scratch["scores1"], scratch["errors0"], "nn"),
        )
        total, _, _ = self.gates(0)
        reads = mosaic.along_rows(jnp.exp(total), self.slots) * past - new
        scratch["reads"][...] = reads
        scratch["query"][...] = self.activate(reads).astype(scratch["query"].dtype)
        plgpu.commit_smem()

    def second_pass(self, full):
        """The second pass; leaves the cotangent of the first one's reads in `reads`."""
        scratch, ops, slots = self.scratch, self.ops, self.slots
        query, x, d_y = scratch["query"], scratch["inputs1"], scratch["d_y"]
        d_scores, errors = scratch["d_scores"], scratch["errors1"]
        predicted = ops.product(x, self.operands[1], "nt")
        total, gamma, last = self.gates(1)
        decay = mosaic.along_rows(jnp.exp(total), slots)
        error = self.error(predicted) * mosaic.along_rows(gamma, slots)
        errors[...] = error.astype(errors.dtype)
        self.store("weighted", decay * ops.matrix(query))
        plgpu.commit_smem()
        scores, d_score, d_past, d_decayed = ops.products(
            (query, errors, "nt"),
            (d_y, x, "nt"),
            (d_y, self.operands[1], "nt"),
            (x, scratch["d_operand1"], "nt"),
        )
        decays_ = self.decays(1)
        self.store("scores2", decays_ * scores)
        # Negative as in the forward pass, whose reads subtract what was written.
        self.store("d_scores", -(decays_ * d_score))
        plgpu.commit_smem()
        through, d_error = ops.products(
            (d_scores, errors, "nn"), (d_scores, query, "tn")
        )
        d_query = decay * d_past + through
        d_total = jnp.sum(ops.matrix(query) * d_query, axis=1)
        reads = ops.matrix(scratch["reads"])
        _, scratch["reads"][...] = mosaic.value_and_vjp(
            self.activate, (reads,), d_query
        )
        d_x, d_alpha = self.write(
            1, full, predicted, d_error, d_decayed, d_total, (scratch["weighted"], d_y)
        )
        direct = ops.product(scratch["scores2"], d_y, "tn")
        x[...] = (d_x - direct).astype(x.dtype)
        self.store("errors1", d_alpha)

    def first_pass(self, d_y, full):
        """The first pass, given its reads' cotangent as a tile; returns that of q."""
        scratch, ops, slots = self.scratch, self.ops, self.slots
        q, x, d_scores = scratch["q"], scratch["inputs0"], scratch["d_scores"]
        total, _, _ = self.gates(0)
        decay = mosaic.along_rows(jnp.exp(total), slots)
        self.store("weighted", decay * ops.matrix(scratch["reads"]))
        plgpu.commit_smem()
        predicted, d_score, d_decayed = ops.products(
            (x, self.operands[0], "nt"),
            (d_y, scratch["errors0"], "nt"),
            (x, scratch["d_operand0"], "nt"),
        )
        self.store("d_scores", -(self.decays(0) * d_score))
        plgpu.commit_smem()
        through, past = ops.products(
            (d_scores, x, "nn"), (scratch["weighted"], self.operands[0], "nn")
        )
        d_q = through + past
        d_total = jnp.sum(ops.matrix(q) * d_q, axis=1)
        d_error = -ops.product(scratch["scores1"], d_y, "tn")
        d_x, d_alpha = self.write(
            0, full, predicted, d_error, d_decayed, d_total, (scratch["weighted"], q)
        )
        direct = ops.product(d_scores, q, "tn")
        x[...] = (d_x + direct).astype(x.dtype)
        self.store("alpha", d_alpha + ops.matrix(scratch["errors1"]))
        return d_q

    def write(self, index, full, predicted, d_error, d_decayed, d_total, change):
        """The write of a pass: gates, its memory, and what inputs and alpha get.

        Args:
            index: the pass.
            full: whether the memory becomes the one after the chunk; else it stays.
            predicted: Z.
            d_error: cotangent of U but for its part from the memory after the chunk.
            d_decayed: x N-^T.
            d_total: <q, q-> of every token.
            change: tiles whose x^T y reaches M through the reads.

        Returns:
            Cotangents of x, but for its part from the reads, and of alpha.
        """
        scratch, ops, slots = self.scratch, self.ops, self.slots
        total, gamma, last = self.gates(index)
        kept = jnp.where(full, 1.0, 0.0)
        left = mosaic.along_rows(kept * jnp.exp(last - total), slots)
        step = mosaic.along_rows(gamma, slots)
        d_error = d_error - left * d_decayed
        alpha = ops.matrix(scratch["alpha"])
        error, d_predicted, d_alpha = mosaic.value_and_vjp(
            self.error_of, (predicted, alpha), step * d_error
        )
        d_gamma = jnp.sum(error * d_error, axis=1)
        decayed = left * step * error
        rows = scratch["d_gates"].at[pl.ds(3 * index, 3)]
        rows[TOTAL] = d_total - gamma * d_gamma
        rows[LAST] = -jnp.sum(decayed * d_decayed, axis=1)
        rows[GAMMA] = d_gamma
        self.store("decayed", decayed)
        self.store("d_predicted", d_predicted)
        plgpu.commit_smem()
        self.pass_memory(index, change, jnp.where(full, jnp.exp(last), 1.0), kept)
        lost, through = ops.products(
            (scratch["decayed"], scratch[f"d_operand{index}"], "nn"),
            (scratch["d_predicted"], self.operands[index], "nn"),
        )
        return through - lost, d_alpha

    def pass_memory(self, index, change, decay, kept):
        """The cotangent of a memory, from after the chunk to before it."""
        ops, d_memory = self.ops, self.scratch[f"d_memory{index}"]
        x = self.scratch[f"inputs{index}"]
        read, start = ops.products(
            (*change, "tn"), (self.scratch["d_predicted"], x, "tn")
        )
        after = decay * ops.matrix(d_memory)
        before = ops.matrix(self.operands[index])
        # By slot; the sum over slots is taken outside of the kernel.
        self.scratch["d_last"][index] = kept * jnp.sum(after * before, axis=1)
        d_memory[...] = after + read + start

    def error(self, predicted):
        return self.error_of(predicted, self.ops.matrix(self.scratch["alpha"]))
