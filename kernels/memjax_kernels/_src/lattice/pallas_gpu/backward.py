"""The backward kernel of Lattice on a GPU: chunks in reverse, each computed again.

A bar denotes a cotangent, L sums over the tokens up to each, and R is the memory
before the division by its norms:

    A- = M <R-, M> - R-      (q rho)- = y- M^T (1 + cwp) + S- W    S- = -tril(y- H^T)
    n2- = -rho^3 rho- / 2    cwp- = y- M^T q rho - 2 cwp n2-
    W- = H A-^T + S-^T q rho + P L^T cwp- + 2 (before + W |h|^2) L^T n2- + T^T before-
    H- = W A- - S^T y- + (T- + T-^T) H + 2 |h|^2- H + P- M
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from memjax_kernels._src.common import mosaic
from memjax_kernels._src.common.mosaic import F32, ROWS, Static
from memjax_kernels._src.common.mosaic_programs import Backward, call
from memjax_kernels._src.lattice.pallas_gpu.inputs import ChunkInputs
from memjax_kernels._src.lattice.pallas_gpu.program import (
    Chunk,
    across_width,
    inverse_norm,
    l2_normalize,
    shared,
)


def backward(static: Static, x: ChunkInputs, residuals, d_y, d_after) -> ChunkInputs:
    """The cotangents of inputs, of `forward`'s residuals and cotangents."""
    m, width = x.start.shape[2:]
    outputs = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype),
        x._replace(whole=None, reset=None),
    )

    def work(*shape, dtype=x.q.dtype):
        return mosaic.tile(*shape, dtype=dtype)

    scratch = shared(x) | {
        "d_y": work(ROWS, width),
        "d_memory": work(m, width, dtype=F32),
        "memory_arrived": plgpu.Barrier(),
        "arrived": plgpu.Barrier(num_arrivals=6),
        "d_written": work(m, width),
        "scores": work(ROWS, ROWS),
        "d_scores": work(ROWS, ROWS),
        "d_gamma": mosaic.vectors(ROWS),
    }
    for name in ("along", "before", "taken", "size"):
        scratch[name] = work(ROWS, m, dtype=F32)
    given = (residuals, d_y, d_after)
    x = x._replace(start=None, empty=None)
    name = "memjax_lattice_backward"
    return call(_Backward, static, x, given, outputs, scratch, name)


class _Backward(Chunk, Backward):
    """One batch element and head, backward; gradients overwrite the tokens."""

    def tokens(self):
        return super().tokens() | {"d_y": self.d_y}

    def gradients(self):
        out = self.out
        return {"q": out.q, "k": out.k, "v": out.v}, {"d_gamma": out.gamma}

    def all_chunks(self):
        self.prepare()
        super().all_chunks()

    def compute(self, full):
        scratch = self.scratch
        squares = self.recompute()
        pl.when(full)(self.through_norms)

        @pl.when(jnp.logical_not(full))
        def _():
            tile = scratch["d_written"]
            tile[...] = self.ops.zeros(tile.shape, tile.dtype)

        plgpu.commit_smem()
        self.through_writes(*self.through_reads(), squares)

    def recompute(self):
        """The chunk, up to its queries."""
        write, along, before, squares = self.residuals()
        taken, size = self.sums(write, along, before, squares)
        for name, value in zip(
            ("along", "before", "taken", "size"),
            (along, before, taken, size),
            strict=True,
        ):
            self.store(name, value)
        self.store("query", self.matrix("q") * inverse_norm(size))
        plgpu.commit_smem()
        return squares

    def through_norms(self):
        """From the memory after the chunk to what is written, and to the one before."""
        written = self.ops.product(self.scratch["write"], self.scratch["h"], "tn")
        memory, d_after = self.matrix("operand"), self.matrix("d_memory")
        along = across_width(memory * written)
        after, scale = l2_normalize(memory + along * memory - written)
        d_rows = scale * (d_after - after * across_width(after * d_after))
        d_along = across_width(d_rows * memory)
        self.store("d_written", d_along * memory - d_rows)
        self.scratch["d_memory"][...] = d_rows + along * d_rows + d_along * written

    def through_reads(self):
        """Cotangents of W so far, of cwp and of n2; that of q overwrites q."""
        scratch, ops = self.scratch, self.ops
        d_y, query, write = scratch["d_y"], scratch["query"], scratch["write"]
        d_past, d_scores, d_write, scores = ops.products(
            (d_y, scratch["operand"], "nt"),
            (d_y, scratch["h"], "nt"),
            (scratch["h"], scratch["d_written"], "nt"),
            (query, write, "nt"),
        )
        # Negated, so that products are added.
        self.store("scores", -self.masked(scores))
        self.store("d_scores", -self.masked(d_scores))
        left = 1.0 + self.matrix("taken")
        self.store("high", self.matrix("query") * left)
        plgpu.commit_smem()
        self.add_to_memory((scratch["high"], d_y, "tn"))
        d_query, more = ops.products(
            (scratch["d_scores"], write, "nn"), (scratch["d_scores"], query, "tn")
        )
        d_query = d_query + d_past * left
        size = self.matrix("size")
        scale = inverse_norm(size)
        q = self.matrix("q")
        d_size = -0.5 * scale * scale * scale * q * d_query
        # `inverse_norm` clamps at 0, where it has no slope.
        d_size = jnp.where(size > 0.0, d_size, 0.0)
        d_taken = d_past * q * scale - 2.0 * self.matrix("taken") * d_size
        # The query is used no more: its gradient takes its place.
        self.store("q", d_query * scale)
        return d_write + more, d_taken, d_size

    def through_writes(self, d_write, d_taken, d_size, squares):
        """Cotangents of gamma, k and v; those of k and v overwrite them."""
        scratch, ops = self.scratch, self.ops
        operand, h, high, low = (scratch[n] for n in ("operand", "h", "high", "low"))
        d_taken = self.summed(d_taken, "tn")
        d_added = self.summed(d_size, "tn")
        along = self.matrix("along")
        gamma, target = self.slots(self.gamma()), self.target(along)
        write = gamma * target
        twice = 2.0 * d_added
        d_write = d_write + d_taken * along
        d_write = d_write + twice * (
            self.matrix("before") + write * self.slots(squares)
        )
        d_squares = jnp.sum(d_added * write * write, axis=1)
        self.store("high", twice * write)
        plgpu.commit_smem()
        d_gram, more = ops.products(
            (high, scratch["write"], "nt"), (scratch["gram"], high, "tn")
        )
        d_write = d_write + more
        self.store("gram", self.masked(d_gram, strictly=True))
        self.scratch["d_gamma"][...] = jnp.sum(d_write * target, axis=1)
        d_target = gamma * d_write
        d_along = d_taken * write
        if self.variant == "enc":
            d_along, d_target = d_along + d_target, -d_target
        self.store("low", d_along)
        plgpu.commit_smem()
        d_h = ops.total(
            (scratch["write"], scratch["d_written"], "nn"),
            (scratch["scores"], scratch["d_y"], "tn"),
            (scratch["gram"], h, "nn"),
            (scratch["gram"], h, "tn"),
            (low, operand, "nn"),
        )
        rows = mosaic.along_rows(d_squares, h.shape[-1])
        d_h = d_h + 2.0 * rows * self.matrix("h")
        self.store("v", d_h if self.variant == "enc" else -d_h)
        plgpu.commit_smem()
        self.add_to_memory((low, h, "tn"))
        if self.variant == "dec":
            # v now holds -h-, and h = k M - v.
            d_target = d_target - ops.product(scratch["v"], operand, "nt")
            self.add_to_memory((scratch["k"], scratch["v"], "tn"), sign=-1.0)
        self.store("k", d_target)
        plgpu.commit_smem()

    def add_to_memory(self, triple, sign=1.0):
        added = self.ops.product(*triple)
        self.scratch["d_memory"][...] = self.matrix("d_memory") + sign * added
