"""The forward kernel of Trellis on a GPU; `entry` says when it runs.

The next chunk's tokens are copied in during the computation.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from memjax_kernels._src.common import mosaic
from memjax_kernels._src.common.mosaic import F32, ROWS, Static
from memjax_kernels._src.common.mosaic_programs import Forward, Program, call
from memjax_kernels._src.common.products import Form
from memjax_kernels._src.trellis import functions
from memjax_kernels._src.trellis.pallas_gpu.inputs import INPUTS, Inputs, tokens_of

# Chunks of tokens in shared memory at a time.
STAGES = 2


def forward(static: Static, x: Inputs, *, with_residuals: bool):
    """Runs the kernel.

    Returns:
        y; the memories after the last full chunk; those at every chunk's start in the
        dtype of q, if `with_residuals`.
    """
    b, n, _, h, _ = x.q.shape
    shapes, dtype = [memory.shape[2:] for memory in x.start], x.q.dtype
    (slots, key_dim), (_, value_dim) = shapes
    memory = [jax.ShapeDtypeStruct((b, h, *s), F32) for s in shapes]
    chunk_starts = [jax.ShapeDtypeStruct((b, n, h, *s), dtype) for s in shapes]
    outputs = (
        jax.ShapeDtypeStruct(x.inputs[1].shape, x.inputs[1].dtype),
        tuple(memory),
        tuple(chunk_starts) if with_residuals else (),
    )
    work = functools.partial(mosaic.tile, ROWS, dtype=dtype)
    staged = functools.partial(mosaic.tile, STAGES, ROWS, dtype=dtype)
    scratch = {
        "q": staged(key_dim),
        "alpha": staged(slots),
        "gates": mosaic.vectors(STAGES, 4, ROWS),
        "scores": work(ROWS),
        "errors": work(slots),
        "decayed": work(slots),
        "query": work(slots),
        "reads": work(value_dim),
        "arrived": plgpu.Barrier(num_arrivals=5, num_barriers=STAGES),
        "memory_arrived": plgpu.Barrier(num_arrivals=2),
    }
    for i, shape in enumerate(shapes):
        scratch[f"inputs{i}"] = staged(shape[1])
        scratch[f"memory{i}"] = mosaic.tile(*shape, dtype=F32)
        scratch[f"operand{i}"] = mosaic.tile(*shape, dtype=dtype)
    return call(_Program, static, x, (), outputs, scratch, "memjax_trellis_forward")


class Passes(Program):
    """Inputs of a pass for both kernels; with staged tokens, `i` is the chunk."""

    def tokens(self):
        return tokens_of(self.x)

    def vectors(self):
        return {"gates": self.x.gates}

    def gates(self, index, i=None):
        """Sums of g, gamma, and the last sum."""
        gates = self.staged("gates", i)
        total = self.ops.row_vector(gates, 2 * index)
        gamma = self.ops.row_vector(gates, 2 * index + 1)
        return total, gamma, gates[2 * index, ROWS - 1]

    def decays(self, index, i=None):
        """exp(total_i - total_j) for j <= i < size, else 0: masked before exp."""
        gates = self.staged("gates", i)
        total = self.ops.row_vector(gates, 2 * index)
        other = self.ops.column_vector(gates, 2 * index)
        difference = mosaic.along_rows(total, ROWS) - mosaic.along_columns(other, ROWS)
        seen = self.ops.causal_mask(self.size)
        return jnp.exp(jnp.where(seen, difference, -1e30))

    def error_of(self, predicted, alpha):
        phi = self.rule.phi
        return functions.error_gradient(phi, predicted, alpha, mosaic.over_slots)

    def activate(self, reads):
        return functions.apply(self.rule.activation, reads, mosaic.over_slots)


class _Program(Passes, Forward):
    """The kernel of one batch element and head."""

    stages = STAGES

    def chunk(self, i, whole):
        # Into the other stage, whose tokens the chunk before has used up.
        pl.when(i + 1 < self.chunks)(lambda: self.fetch(i + 1))
        self.begin(i)
        plgpu.barrier_wait(self.staged("arrived", i))
        ops, scratch, operands = self.ops, self.scratch, self.each("operand")
        q, inputs = self.staged("q", i), [self.staged(n, i) for n in INPUTS]
        triples: list[tuple[Any, Any, Form]] = [
            (x, m, "nt") for x, m in zip(inputs, operands, strict=True)
        ]
        *predicted, scores = ops.products(*triples, (q, inputs[0], "nt"))
        full = i < whole
        y = self.one_pass(0, i, predicted[0], q, scores, full)
        self.store("query", self.activate(y))
        y = self.one_pass(1, i, predicted[1], scratch["query"], None, full)
        self.write(i, y)

    def one_pass(self, index, i, predicted, query, scores, full):
        """Reads of a pass; its memory becomes the one after a full chunk."""
        ops, scratch, slots = self.ops, self.scratch, self.x.alpha.shape[-1]
        operand, memory = self.each("operand")[index], self.each("memory")[index]
        x, (total, gamma, last) = self.staged(INPUTS[index], i), self.gates(index, i)
        error = self.error_of(predicted, ops.matrix(self.staged("alpha", i)))
        # Negated, so that products are added.
        error = -error * mosaic.along_rows(gamma, slots)
        decayed = error * mosaic.along_rows(jnp.exp(last - total), slots)
        self.store("errors", error)
        self.store("decayed", decayed)
        plgpu.commit_smem()
        # The second pass's query depends on the first, so that its scores come late.
        if index == 1:
            scores = ops.product(query, scratch["errors"], "nt")
        scores = self.decays(index, i) * scores
        self.store("scores", scores)
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
