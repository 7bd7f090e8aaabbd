"""The backward kernel of Lattice with C = 1 on a GPU: blocks of tokens in reverse.

The forward kernel saves the memory at a block's start. From there the block is computed
again twice: once for the memory at the start of its groups, then each group for the
memory before each of its tokens. Memories are never computed backwards.

A bar denotes a cotangent, R the memory before the division by its norms, A after it,
rho = 1 / |s| of the read; o is the product of elements, sums run over slots i:

    q- = rho <R, y->       n2- = -rho^3 q <R, y-> / 2
    R- = q rho y- + (A- - A <A, A->) / |R|
    w- = p <R-, s> - <R-, h> + 2 w (|h|^2 - p^2) n2-
    p- = w <R-, s> - 2 w^2 p n2-  (+ gamma w- for "enc", where c = p - k)
    h- = sum_i p- s - w R- + 2 w^2 n2- h
    s- = (1 + w p) o R- + p- h  (+ k h- for "dec", where h = sum_i k s - v)
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from memjax_kernels._src.common import mosaic
from memjax_kernels._src.common.mosaic import F32
from memjax_kernels._src.lattice.pallas_gpu.exact_program import (
    REDUCTIONS,
    Program,
    shared,
)
from memjax_kernels._src.lattice.pallas_gpu.inputs import (
    GROUP,
    GROUPS,
    Gradients,
    Static,
    TokenInputs,
)
from memjax_kernels._src.lattice.pallas_gpu.program import (
    across_width,
    call,
    l2_normalize,
)


def backward(static: Static, x: TokenInputs, residuals, d_y, d_after) -> Gradients:
    """Runs the backward kernel on `forward`'s residuals and cotangents."""
    m, width = x.start.shape[2:]
    outputs = Gradients(
        *(
            None if a is None else jax.ShapeDtypeStruct(a.shape, a.dtype)
            for a in (x.q, x.k, x.v, x.q, x.start, x.empty)
        )
    )
    scratch = shared(x) | {
        "arrived": plgpu.Barrier(num_arrivals=5),
        "d_y": mosaic.vectors(GROUP, width),
        "d_gamma": mosaic.vectors(GROUP, m),
        # Those at the start of groups, then those before every token but the first.
        "memories": mosaic.tile(GROUPS + GROUP - 1, m, width, dtype=F32),
        "d_memory": mosaic.tile(m, width, dtype=F32),
        "memory_arrived": plgpu.Barrier(),
    }
    x = x._replace(start=None)
    given = (residuals, d_y, d_after)
    name = "exact_backward"
    return call(_Backward, static, x, given, outputs, scratch, name, **REDUCTIONS)


class _Backward(Program):
    """One batch element and head, backward; gradients overwrite the tokens."""

    def __init__(self, static, x, residuals, d_y, d_after, outputs, scratch):
        super().__init__(static, x, scratch)
        self.residuals, self.d_y, self.d_after, self.out = (
            residuals,
            d_y,
            d_after,
            outputs,
        )
        self.memories, self.d_memory = scratch["memories"], scratch["d_memory"]

    def tokens(self):
        return super().tokens() | {"d_y": self.d_y}

    def compute(self):
        self.fetch_memory(self.d_after.at[*self.at], self.d_memory)
        if self.out.empty is not None:
            self.out.empty[*self.at] = self.ops.zeros(self.d_memory.shape)
        blocks = self.groups // GROUPS
        lax.fori_loop(0, blocks, lambda i, _: self.block(blocks - 1 - i), None)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.d_memory, self.out.start.at[*self.at])
        plgpu.wait_smem_to_gmem(0)

    def fetch_memory(self, source, target):
        arrived = self.scratch["memory_arrived"]
        plgpu.copy_gmem_to_smem(source, target, arrived)
        plgpu.barrier_wait(arrived)

    def block(self, i):
        row, head = self.at
        plgpu.commit_smem()
        self.fetch_memory(self.residuals.at[row, i, head], self.memories.at[0])
        first = i * GROUPS
        # Memories at the start of groups: those before all tokens would not fit.
        lax.fori_loop(0, GROUPS - 1, lambda j, _: self.through(first, j), None)
        last = GROUPS - 1
        lax.fori_loop(0, GROUPS, lambda j, _: self.group(first, last - j), None)

    def through(self, first, j):
        """From the start of a group to that of the next."""
        self.fetch(first + j)

        def token(t, _):
            self.recompute(first + j, t, jnp.where(t == 0, j, j + 1), j + 1)

        lax.fori_loop(0, GROUP, token, None)

    def group(self, first, j):
        (row, head), scratch, i = self.at, self.scratch, first + j
        self.fetch(i)

        def before(t):
            return jnp.where(t == 0, j, GROUPS + t - 1)

        def again(t, _):
            self.recompute(i, t, before(t), GROUPS + t)

        def token(t, _):
            self.token(i, GROUP - 1 - t, before(GROUP - 1 - t))

        lax.fori_loop(0, GROUP - 1, again, None)
        # The last token's memory has not been looked at yet.
        self.clear(self.memories.at[before(GROUP - 1)], i, GROUP - 1)
        lax.fori_loop(0, GROUP, token, None)
        plgpu.commit_smem()
        for name, out in zip(
            ("q", "k", "v", "d_gamma"),
            (self.out.q, self.out.k, self.out.v, self.out.gamma),
            strict=True,
        ):
            plgpu.copy_smem_to_gmem(scratch[name], out.at[row, i, :, head, :])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def recompute(self, i, t, source, target):
        """The memory after token t, from that before it."""
        self.clear(self.memories.at[source], i, t)
        written = self.write(self.ops.matrix(self.memories.at[source]), t)
        self.memories[target] = l2_normalize(written.rows)[0]

    def token(self, i, t, source):
        scratch, ops, rows = self.scratch, self.ops, self.rows
        memory = ops.matrix(self.memories.at[source])
        x = self.write(memory, t)
        q, d_y = self.by_slot("q", t), self.columns(self.by_width("d_y", t))
        read = jnp.sum(x.rows * d_y, axis=1)
        d_size = -0.5 * x.scale * x.scale * x.scale * q * read
        # `inverse_norm` clamps at 0, where it has no slope.
        d_size = jnp.where(x.size > 0.0, d_size, 0.0)
        d_after = ops.matrix(self.d_memory)
        after, scale = l2_normalize(x.rows)
        d_rows = scale * (d_after - after * across_width(after * d_after))
        d_rows = d_rows + rows(q * x.scale) * d_y
        scratch["q"][t] = x.scale * read

        left = jnp.sum(d_rows * memory, axis=1)
        d_write = x.along * left - jnp.sum(d_rows * x.h, axis=1)
        d_write = d_write + 2.0 * x.write * x.across * d_size
        scratch["d_gamma"][t] = d_write * x.target
        # Of |h|^2, twice; that of <s, h>^2 is its negative.
        d_squares = 2.0 * x.write * x.write * d_size
        d_along = x.write * left - d_squares * x.along
        d_k = scratch["gamma"][t] * d_write
        if self.variant == "enc":
            d_along, d_k = d_along + d_k, -d_k

        d_h = rows(d_along) * memory - rows(x.write) * d_rows + rows(d_squares) * x.h
        d_h = jnp.sum(d_h, axis=0)
        d_memory = rows(1.0 + x.write * x.along) * d_rows + rows(d_along) * x.h
        if self.variant == "dec":
            d_rows_h = self.columns(d_h)
            d_memory = d_memory + rows(self.by_slot("k", t)) * d_rows_h
            d_k = d_k + jnp.sum(memory * d_rows_h, axis=1)
        scratch["k"][t] = d_k
        scratch["v"][t] = d_h if self.variant == "enc" else -d_h
        self.d_memory[...] = d_memory
        self.give_to_empty(i, t)

    def give_to_empty(self, i, t):
        """Ends the gradient of a memory that was emptied before token t."""
        if self.x.reset is None:
            return

        @pl.when(self.x.reset[self.at[0], i, t] != 0)
        def _():
            before = self.ops.global_matrix(self.out.empty, *self.at)
            self.out.empty[*self.at] = before + self.ops.matrix(self.d_memory)
            self.d_memory[...] = self.ops.zeros(self.d_memory.shape)
